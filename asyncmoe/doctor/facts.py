"""What was found on a machine: plain data, which travels as JSON and which the checks judge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from asyncmoe.config.devices import Wanted
from asyncmoe.doctor.environment import PythonFacts
from asyncmoe.trainer.model.switches import RunFeatures


@dataclass(frozen=True)
class GpuFacts:
    """A line of nvidia-smi.

    Attributes:
        memory_mib, used_mib: all of it, and what processes use now.
        compute_mode: Default, Exclusive_Process or Prohibited.
        capability: e.g. 9.0.
        mig: whether it is cut into instances.
        uuid: by which CUDA_VISIBLE_DEVICES may name it.
    """

    index: int
    name: str
    memory_mib: int
    used_mib: int
    compute_mode: str
    capability: str
    mig: bool = False
    uuid: str = ""


@dataclass(frozen=True)
class Nvidia:
    """What NVIDIA's driver shows.

    Attributes:
        on_bus: GPUs on the PCI bus, whether or not there is a driver.
        links: how GPU i reaches GPU j, as `nvidia-smi topo -m` names it (NV18, PIX, SYS, ...); empty: it did not say.
        trouble: why nvidia-smi did not answer.
        chosen: entries of CUDA_VISIBLE_DEVICES; None: it is not set.
    """

    on_bus: int = 0
    driver: str | None = None
    gpus: tuple[GpuFacts, ...] = ()
    links: tuple[tuple[str, ...], ...] = ()
    trouble: str | None = None
    chosen: tuple[str, ...] | None = None

    @property
    def present(self) -> bool:
        """There is a GPU, usable or not."""
        return bool(self.on_bus or self.gpus)

    @property
    def visible(self) -> tuple[GpuFacts, ...]:
        """Those that CUDA shows a process, in its order, as far as it can be told: CUDA_VISIBLE_DEVICES may name instances of a GPU. The
        first entry that names none ends the list (CUDA C++ Programming Guide, "CUDA Environment Variables")."""
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
class Port:
    """A port of an InfiniBand (or RoCE) adapter: state and rate as /sys/class/infiniband has them."""

    device: str
    number: int
    state: str
    rate: str
    link_layer: str


@dataclass(frozen=True)
class Fabric:
    """Adapters for RDMA.

    Attributes:
        peer_memory: the module nvidia_peermem is loaded, by which they reach a GPU's memory.
    """

    ports: tuple[Port, ...] = ()
    peer_memory: bool = False


@dataclass(frozen=True)
class SystemLimits:
    """What the system lets a process have.

    Attributes:
        shm_bytes, shm_free: of /dev/shm; None: there is none.
        open_files, open_files_hard: RLIMIT_NOFILE.
        memlock: bytes of RLIMIT_MEMLOCK; None: unlimited, or the user is root.
    """

    shm_bytes: int | None
    shm_free: int | None
    open_files: int
    open_files_hard: int
    memlock: int | None


@dataclass(frozen=True)
class Network:
    """Names and addresses.

    Attributes:
        addresses: what this host's own name resolves to.
        name_trouble: why it does not.
        loopback_trouble: why a port of 127.0.0.1 cannot be listened on and connected to.
        interfaces: names of them.
        chosen: variables that name interfaces (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME).
        ephemeral: first and last of the ports the system gives to whoever asks for any.
    """

    addresses: tuple[str, ...] = ()
    name_trouble: str | None = None
    loopback_trouble: str | None = None
    interfaces: tuple[str, ...] = ()
    chosen: Mapping[str, str] = field(default_factory=dict)
    ephemeral: tuple[int, int] = (32768, 60999)


@dataclass(frozen=True)
class Clock:
    """The system's clock.

    Attributes:
        synchronised: by NTP or PTP; None: nobody could tell.
        told_by: adjtimex or timedatectl.
        error_s: at most so far from the reference, by the kernel's own account.
    """

    synchronised: bool | None
    told_by: str
    error_s: float | None = None


@dataclass(frozen=True)
class WantedPort:
    """A TCP port of the configuration, and why it cannot be had (None: it can)."""

    key: str
    host: str
    number: int
    trouble: str | None = None


@dataclass(frozen=True)
class Disk:
    """The run directory, or what exists of the way to it.

    Attributes:
        probed: the directory tried.
        kind: of file system, as the kernel calls it (ext4, nfs4, lustre, ...).
        free_bytes, free_files: what a user may still take; files None: the file system does not count them.
        checkpoints: complete ones that are there.
        ahead_s: how far the file system's clock is ahead of this machine's.
        trouble: what could not be done there: write, rename, lock.
    """

    directory: str
    probed: str
    kind: str
    free_bytes: int
    free_files: int | None
    checkpoints: int
    ahead_s: float | None
    trouble: str | None = None


@dataclass(frozen=True)
class ModelFacts:
    """The model of the configuration.

    Attributes:
        to_make: it does not exist yet and the run will make it.
        family: Hugging Face's model_type.
        parameters: those of the model, or of the adapter where one is trained: what is optimised and saved.
        weights_bytes: of all tensors together.
        trouble: why it cannot be used.
    """

    path: str
    to_make: bool = False
    family: str | None = None
    parameters: int | None = None
    weights_bytes: int | None = None
    trouble: str | None = None


@dataclass(frozen=True)
class OnGpus:
    """What a configuration puts on GPUs.

    Attributes:
        places: on its machine; of several, on one of the trainer and on one of the engines.
        way: how weights travel between GPUs: "nccl" or "ipc".
        float32: why engines in float32 would fail there; None: they are not, or their attention takes it.
        trainer_bytes: on the GPU of a rank, of the stage that holds most.
        engine_bytes: on each GPU of an engine, with a KV cache as it is configured, else of one conversation; both None: not known.
        trainer_parts, engine_parts: what they consist of, in bytes, under the planner's names (`asyncmoe.plan.memory`).
        bfloat16: trainer or engines compute in it.
        transport: `sync.transport`; None: weights are not sent shard to shard.
        megatron: `trainer.megatron`.
        features: what decides Megatron's switches; None: not known.
        trainer_nodes: `cluster.trainer_nodes`.
    """

    places: tuple[Wanted, ...]
    way: str
    float32: str | None = None
    trainer_bytes: int | None = None
    engine_bytes: int | None = None
    trainer_parts: Mapping[str, int] = field(default_factory=dict)
    engine_parts: Mapping[str, int] = field(default_factory=dict)
    bfloat16: bool = True
    transport: Literal["auto", "shm", "gloo", "nccl", "ipc"] | None = None
    megatron: Mapping[str, bool | str | None] = field(default_factory=dict)
    features: RunFeatures | None = None
    trainer_nodes: int = 1


@dataclass(frozen=True)
class RunFacts:
    """A configuration, and what it asks of the machine.

    Attributes:
        trouble: why it cannot be used; the rest is then empty.
        digest: of all its values.
        network: at which address other machines reach this one (cluster.network); "loopback": there are none.
        clock_s: how far the clocks of two machines may be apart.
        shm_bytes: at most so much of /dev/shm for weights under way.
        connections: at most so many requests at once, each with a socket.
        checkpoint_bytes: at most so much for one; None: the model is not known.
        keep_checkpoints: how many are kept; one more is there while the next is written.
        on_gpus: what it asks of GPUs, were it run on some; None: its sizes do not suit its model, or are not known.
        disk, model: None: they were not looked at, or did not answer in time (`disk_trouble`, `model_trouble`).
    """

    config: str
    trouble: str | None = None
    digest: str | None = None
    network: str = "loopback"
    clock_s: float | None = None
    shm_bytes: int = 0
    connections: int = 0
    checkpoint_bytes: int | None = None
    keep_checkpoints: int = 1
    ports: tuple[WantedPort, ...] = ()
    disk: Disk | None = None
    disk_trouble: str | None = None
    model: ModelFacts | None = None
    model_trouble: str | None = None
    on_gpus: OnGpus | None = None

    @property
    def several_machines(self) -> bool:
        """Its processes reach each other over a network."""
        return self.network != "loopback"


@dataclass(frozen=True)
class Machine:
    """All of it.

    Attributes:
        host: its name.
        asyncmoe: the version, and the beginning of a digest of the package's Python files.
        requirements: version specifiers by name, as pyproject.toml declares them; `python` is among them.
        train: the names among them that trainer and controller cannot do without.
        sources: digests of the extensions' sources as they are now; empty: an installation without sources.
        engine: None: the same Python as the trainer's.
        run: None: no configuration was given.
    """

    host: str
    asyncmoe: str
    kernel: str
    cores: int
    memory_bytes: int
    requirements: Mapping[str, str]
    train: tuple[str, ...]
    sources: tuple[str, ...]
    trainer: PythonFacts
    engine: PythonFacts | None
    nvidia: Nvidia
    fabric: Fabric
    limits: SystemLimits
    network: Network
    clock: Clock
    run: RunFacts | None

    @property
    def engine_python(self) -> PythonFacts:
        """The Python that runs SGLang."""
        return self.engine or self.trainer
