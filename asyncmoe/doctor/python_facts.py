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
        cuda: whether the CUDA kernels are in it.
        built_from: digests of the sources of `asyncmoe.reshard._C` and `asyncmoe.trajectory._C`; empty: a build that does not say.
        architectures: compute capabilities, times 10, that the kernels are built for; empty without kernels.
    """

    package: str | None
    trouble: str | None = None
    cuda: bool = False
    built_from: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()


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
class Shown:
    """A GPU, or an instance of one, as torch describes it.

    Attributes:
        memory_bytes: all of it.
        capability: e.g. 9.0.
        uuid: NVIDIA's, without the GPU- before it; "": this torch does not say.
    """

    memory_bytes: int
    capability: str
    uuid: str = ""


@dataclass(frozen=True)
class Torch:
    """An imported torch.

    Attributes:
        cuda: the CUDA version it was built for; None: a CPU build.
        devices: GPUs it sees.
        trouble: why it cannot use CUDA although it was built for it.
        apart: pairs of GPUs that do not reach each other's memory.
        shown: the GPUs it sees, in CUDA's order; empty: it was not asked.
    """

    version: str
    cuda: str | None = None
    devices: int = 0
    trouble: str | None = None
    apart: tuple[tuple[int, int], ...] = ()
    shown: tuple[Shown, ...] = ()


@dataclass(frozen=True)
class PythonFacts:
    """One Python environment: the trainer's and the controller's, or the engines'.

    Attributes:
        version: None: it could not be run, and `unfinished` says why.
        packages: versions of those of the declared requirements that are installed.
        cuda_driver: the newest CUDA version the driver takes, as cuDriverGetVersion has it (12080 is 12.8); None: no driver.
        transformer_engine: it was imported.
        deep_ep: the package of DeepEP is there.
        unfinished: at which step the look inside broke off, and why.
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
    deep_ep: bool = False
    unfinished: str | None = None
