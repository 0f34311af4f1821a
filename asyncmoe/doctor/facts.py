"""Facts about a machine: plain data, serialized as JSON and judged by the checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncmoe.config.devices import Wanted
from asyncmoe.config.transports import TransportChoice, TransportName
from asyncmoe.doctor.python_facts import PythonFacts
from asyncmoe.trainer.model.switches import RunFeatures


@dataclass(frozen=True)
class GpuFacts:
    """A GPU, from a line of nvidia-smi.

    Attributes:
        memory_mib, used_mib: total memory, and memory in use by processes.
        compute_mode: Default, Exclusive_Process or Prohibited.
        capability: compute capability, e.g. 9.0.
        mig: whether the GPU is partitioned into instances.
        uuid: identifier by which CUDA_VISIBLE_DEVICES may name the GPU.
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
    """GPUs and driver of a machine.

    Attributes:
        on_bus: GPUs on the PCI bus, with or without a driver.
        links: link between GPU i and GPU j from `nvidia-smi topo -m` (NV18, PIX, SYS, ...); empty if unknown.
        trouble: why nvidia-smi did not answer.
        chosen: entries of CUDA_VISIBLE_DEVICES; None if it is not set.
    """

    on_bus: int = 0
    driver: str | None = None
    gpus: tuple[GpuFacts, ...] = ()
    links: tuple[tuple[str, ...], ...] = ()
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
class Port:
    """A port of an InfiniBand or RoCE adapter, with state and rate from /sys/class/infiniband."""

    device: str
    number: int
    state: str
    rate: str
    link_layer: str


@dataclass(frozen=True)
class Fabric:
    """RDMA adapters.

    Attributes:
        peer_memory: whether the module nvidia_peermem is loaded, through which adapters reach GPU memory.
    """

    ports: tuple[Port, ...] = ()
    peer_memory: bool = False


@dataclass(frozen=True)
class SystemLimits:
    """Limits of a process.

    Attributes:
        shm_bytes, shm_free: total and free bytes of /dev/shm; None if it does not exist.
        open_files, open_files_hard: soft and hard RLIMIT_NOFILE.
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
        addresses: addresses that this host's name resolves to.
        name_trouble: why the name does not resolve.
        loopback_trouble: why a connection over 127.0.0.1 fails.
        interfaces: names of the network interfaces.
        chosen: environment variables that name interfaces (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), with their values.
        ephemeral: first and last ephemeral port.
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
        synchronised: whether NTP or PTP synchronizes the clock; None if unknown.
        told_by: source of this fact: adjtimex or timedatectl.
        error_s: the kernel's upper bound for the offset from the reference, in seconds.
    """

    synchronised: bool | None
    told_by: str
    error_s: float | None = None


@dataclass(frozen=True)
class SandboxFacts:
    """What confines programs of the tool python.

    Attributes:
        landlock: version of Landlock; 0: the kernel has none, or it is switched off.
        programs: those of bwrap, docker and podman that are there.
        trouble, hint: why the default sandbox does not run a program, and what to do about it; None: it runs one.
    """

    landlock: int = 0
    programs: tuple[str, ...] = ()
    trouble: str | None = None
    hint: str | None = None


@dataclass(frozen=True)
class WantedPort:
    """A TCP port of the configuration; `trouble` tells why it is unavailable, and is None if it is available."""

    key: str
    host: str
    number: int
    trouble: str | None = None


@dataclass(frozen=True)
class Disk:
    """The file system of the run directory, or of its nearest existing parent.

    Attributes:
        probed: the directory that was tested.
        kind: the kernel's name of the file system (ext4, nfs4, lustre, ...).
        free_bytes, free_files: bytes and files available to the user; files None if the file system does not count them.
        checkpoints: number of complete checkpoints.
        ahead_s: seconds by which the file system's clock is ahead of this machine's.
        trouble: the failed operation: write, rename or lock.
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
        to_make: the model does not exist yet and the run will make it.
        family: Hugging Face's model_type.
        parameters: number of parameters that are optimized and saved: the model's, or the adapter's if one is trained.
        weights_bytes: bytes of all tensors.
        trouble: why the model cannot be used.
    """

    path: str
    to_make: bool = False
    family: str | None = None
    parameters: int | None = None
    weights_bytes: int | None = None
    trouble: str | None = None


@dataclass(frozen=True)
class OnGpus:
    """A configuration's use of GPUs.

    Attributes:
        places: GPUs wanted on the machine; with several machines, on a trainer node and on an engine node.
        way: the transport of weights between GPUs; "nccl" if they are broadcast.
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
    way: TransportName
    float32: str | None = None
    trainer_bytes: int | None = None
    engine_bytes: int | None = None
    trainer_parts: Mapping[str, int] = field(default_factory=dict)
    engine_parts: Mapping[str, int] = field(default_factory=dict)
    bfloat16: bool = True
    transport: TransportChoice | None = None
    megatron: Mapping[str, bool | str | None] = field(default_factory=dict)
    features: RunFeatures | None = None
    trainer_nodes: int = 1


@dataclass(frozen=True)
class RunFacts:
    """A configuration and its demands on the machine.

    Attributes:
        trouble: why the configuration cannot be used; the other fields are then empty.
        digest: digest of all values of the configuration.
        network: address at which other machines reach this one (cluster.network); "loopback": no other machines.
        max_clock_skew_s: highest allowed clock difference between two machines, in seconds.
        shm_bytes: upper bound for the bytes of weights in transit in /dev/shm.
        connections: upper bound for concurrent requests, each with a socket.
        checkpoint_bytes: upper bound for the bytes of a checkpoint; None if the model is unknown.
        keep_checkpoints: number of checkpoints kept; one more exists while the next is written.
        on_gpus: demands on GPUs if the run used them; None if its sizes do not suit its model, or are unknown.
        disk, model: None if they were not probed, or did not answer in time (`disk_trouble`, `model_trouble`).
        sandbox: where the tool python runs programs: "namespaces" in the default sandbox, "no namespaces" with that option, the name of
            another backend; None: no such tool is named.
        own: names of the user's own parts of the objective and model family, by the keys that name them.
        own_trouble: why some of it cannot be used.
        rollout_code: names of the user's other code: tasks, scorers, environments, agents, tools.
        rollout_trouble: which of it cannot be found, or which package that it needs.
    """

    config: str
    trouble: str | None = None
    digest: str | None = None
    network: str = "loopback"
    max_clock_skew_s: float | None = None
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
    sandbox: str | None = None
    own: Mapping[str, str] = field(default_factory=dict)
    own_trouble: str | None = None
    rollout_code: Mapping[str, str] = field(default_factory=dict)
    rollout_trouble: str | None = None

    @property
    def several_machines(self) -> bool:
        """True if the run's processes communicate over a network."""
        return self.network != "loopback"


@dataclass(frozen=True)
class Machine:
    """All facts about a machine.

    Attributes:
        host: host name.
        asyncmoe: the version, and the first digits of a digest of the package's Python files.
        requirements: version specifiers by name from pyproject.toml, including `python`.
        train: the names of the requirements of trainer and controller.
        sources: digests of the extensions' current sources; empty for an installation without sources.
        engine: the engines' Python; None if it is the trainer's.
        run: the configuration; None if none was given.
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
    sandbox: SandboxFacts = field(default_factory=SandboxFacts)

    @property
    def engine_python(self) -> PythonFacts:
        """The Python that runs SGLang."""
        return self.engine or self.trainer
