"""Facts about a machine, by which a run on GPUs is judged: plain data, so that a test can construct any machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncmoe.doctor.planned import PlannedRun
from asyncmoe.platform.kernels import Kernels
from asyncmoe.rpc.nics import Nics

IN_USE = 0.05
"""Share of a GPU's memory that an idle driver may take."""


@dataclass(frozen=True)
class GpuFacts:
    """A GPU as a line of nvidia-smi describes it, or as CUDA shows it to a process (it may then be a MIG instance). `doctor.cards` merges
    both descriptions.

    Attributes:
        index: nvidia-smi's number; None if nvidia-smi does not list the GPU (a MIG instance), or if the facts are torch's.
        memory_mib, used_mib: total memory, 0 if unknown; and memory in use by processes.
        compute_mode: Default, Exclusive_Process or Prohibited.
        capability: compute capability, e.g. 9.0.
        mig: whether the GPU is partitioned into instances.
        uuid: identifier by which CUDA_VISIBLE_DEVICES may name the GPU.
        number: CUDA's number.
    """

    index: int | None
    name: str
    memory_mib: int = 0
    used_mib: int = 0
    compute_mode: str = "Default"
    capability: str = ""
    mig: bool = False
    uuid: str = ""
    number: int = 0

    @property
    def label(self) -> str:
        """`1`, or with nvidia-smi's number if it differs: `1 (nvidia-smi: 6)`."""
        return str(self.number) if self.index in (None, self.number) else f"{self.number} (nvidia-smi: {self.index})"

    @property
    def generation(self) -> tuple[int, int] | None:
        """The capability as numbers; None if unknown."""
        major, _, minor = self.capability.partition(".")
        return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None

    @property
    def busy(self) -> bool:
        """True if more memory is in use than an idle driver takes; False if the use is unknown, as for a MIG instance."""
        return self.used_mib > IN_USE * self.memory_mib > 0


@dataclass(frozen=True)
class Nvidia:
    """GPUs and driver of a machine.

    Attributes:
        on_bus: GPUs on the PCI bus, with or without a driver.
        trouble: why nvidia-smi did not answer.
        chosen: entries of CUDA_VISIBLE_DEVICES; None if it is not set.
    """

    on_bus: int = 0
    driver: str | None = None
    gpus: tuple[GpuFacts, ...] = ()
    trouble: str | None = None
    chosen: tuple[str, ...] | None = None

    @property
    def present(self) -> bool:
        """True if there is a GPU, usable or not."""
        return bool(self.on_bus or self.gpus)

    @property
    def visible(self) -> tuple[GpuFacts, ...]:
        """The GPUs that CUDA shows a process, in CUDA's order, except for MIG instances named in CUDA_VISIBLE_DEVICES. The first entry
        that matches no GPU ends the list (CUDA C++ Programming Guide, "CUDA Environment Variables")."""
        if self.chosen is None:
            return self.gpus
        found: list[GpuFacts] = []
        for entry in self.chosen:
            gpu = next((g for g in self.gpus if entry == str(g.index) or (entry and g.uuid.startswith(entry))), None)
            if gpu is None:
                break
            found.append(gpu)
        return tuple(found)


@dataclass(frozen=True)
class Extension:
    """The compiled extensions of asyncmoe in a Python environment.

    Attributes:
        package: the directory of asyncmoe; None if it is not importable.
        trouble: why they cannot be imported.
        cuda: True if built with the CUDA kernels.
        built_from: digests of the sources of `asyncmoe.reshard._C` and `asyncmoe.trajectory._C`; empty for a build without digests.
        architectures: compute capabilities, times 10, that the kernels are built for; empty without kernels.
    """

    package: str | None
    trouble: str | None = None
    cuda: bool = False
    built_from: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Nccl:
    """The libnccl that `asyncmoe.reshard` opens.

    Attributes:
        version: result of ncclGetVersion, e.g. 22703; None if the library cannot be used, for the reason `trouble`.
    """

    version: int | None = None
    trouble: str = "it cannot be opened without asyncmoe's extension"


@dataclass(frozen=True)
class Torch:
    """An imported torch.

    Attributes:
        cuda: the CUDA version it was built for; None: a CPU build.
        trouble: why a CUDA build cannot use CUDA.
        apart: pairs of GPUs that cannot access each other's memory.
        shown: the GPUs it sees, in CUDA's order.
    """

    version: str
    cuda: str | None = None
    trouble: str | None = None
    apart: tuple[tuple[int, int], ...] = ()
    shown: tuple[GpuFacts, ...] = ()


@dataclass(frozen=True)
class PythonFacts:
    """One Python environment: the trainer's and the controller's, or the engines'.

    Attributes:
        version: None if this Python could not be run; `unfinished` says why.
        packages: versions of the declared requirements that are installed.
        cuda_driver: the newest CUDA version the driver supports, as in cuDriverGetVersion (12080 is 12.8); None: no driver.
        kernels: result of `asyncmoe.platform.kernels.detect`; None if it was not called, or raised an error.
        transformer_engine: True if it was imported.
        unfinished: the step at which the probe stopped, and why.
    """

    executable: str
    version: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    extension: Extension | None = None
    nccl: Nccl = Nccl()
    cuda_driver: int | None = None
    torch: Torch | None = None
    kernels: Kernels | None = None
    transformer_engine: bool = False
    unfinished: str | None = None


@dataclass(frozen=True)
class Machine:
    """All facts about a machine.

    Attributes:
        host: host name.
        requirements: version specifiers by name from pyproject.toml.
        train: the names of the requirements of trainer and controller.
        sources: digests of the extensions' current sources; empty for an installation without sources.
        engine: the engines' Python; None if it is the trainer's.
        run: the configuration and its model; None without one, or if they cannot be used.
    """

    host: str
    requirements: Mapping[str, str]
    train: tuple[str, ...]
    sources: tuple[str, ...]
    trainer: PythonFacts
    engine: PythonFacts | None
    nvidia: Nvidia
    nics: Nics
    run: PlannedRun | None

    @property
    def engine_python(self) -> PythonFacts:
        """The Python that runs SGLang."""
        return self.engine or self.trainer

    @property
    def pythons(self) -> tuple[tuple[str, PythonFacts], ...]:
        """Every Python, with its owner in words."""
        engines = () if self.engine is None else (("the engines'", self.engine),)
        return (("the trainer's", self.trainer), *engines)
