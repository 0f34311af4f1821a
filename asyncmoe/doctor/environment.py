"""Facts about a Python environment: plain data, part of `facts`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Apex:
    """The package that `import apex` finds.

    Attributes:
        nvidia: the package has the modules of NVIDIA's apex; the package of that name on PyPI is a web toolkit.
        kernels: its CUDA extensions were built.
    """

    nvidia: bool
    kernels: bool


@dataclass(frozen=True)
class Extension:
    """The compiled extensions of asyncmoe in a Python environment.

    Attributes:
        package: the directory of asyncmoe; None if it is not importable.
        trouble: why an extension cannot be imported.
        cuda: whether the extension contains the CUDA kernels.
        built_from: source digests of `asyncmoe.reshard._C` and `asyncmoe.record._C`; empty if the build does not record them.
    """

    package: str | None
    trouble: str | None = None
    cuda: bool = False
    built_from: tuple[str, ...] = ()


@dataclass(frozen=True)
class Nccl:
    """libnccl as `asyncmoe.reshard` opens it.

    Attributes:
        version: result of ncclGetVersion, e.g. 22703; None if the library cannot be used.
    """

    library: str
    version: int | None
    trouble: str | None = None


@dataclass(frozen=True)
class Torch:
    """An imported torch.

    Attributes:
        cuda: the CUDA version it was built for; None for a CPU build.
        devices: number of GPUs that torch sees.
        trouble: why a CUDA build cannot use CUDA.
        apart: pairs of GPUs without peer access to each other's memory.
    """

    version: str
    cuda: str | None = None
    devices: int = 0
    trouble: str | None = None
    apart: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class PythonFacts:
    """One Python environment: the trainer's and the controller's, or the engines'.

    Attributes:
        version: Python version; None if this Python could not be run, see `unfinished`.
        packages: versions of the declared requirements that are installed.
        cuda_driver: newest CUDA version that the driver supports, from cuDriverGetVersion (12080 is 12.8); None: no driver.
        transformer_engine: Transformer Engine was imported.
        unfinished: the step at which the probe failed, and why.
    """

    executable: str
    version: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    apex: Apex | None = None
    extension: Extension | None = None
    nccl: Nccl | None = None
    cuda_driver: int | None = None
    torch: Torch | None = None
    transformer_engine: bool = False
    unfinished: str | None = None
