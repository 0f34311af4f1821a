"""Checks of a configuration on this machine's GPUs: transport, Megatron's switches, placement and memory.

They call the functions that decide these when the run starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from asyncmoe.config.devices import Devices, Wanted, counted, named, place
from asyncmoe.config.trainer import MegatronSection
from asyncmoe.config.transports import transport_for
from asyncmoe.doctor import cards, verdict
from asyncmoe.doctor.cards import GpuCard, labelled
from asyncmoe.doctor.facts import Machine, OnGpus
from asyncmoe.doctor.verdict import Verdict
from asyncmoe.errors import ConfigError
from asyncmoe.plan import memory, relief
from asyncmoe.platform.kernels import Kernels, release
from asyncmoe.trainer.model import switches


def transport(machine: Machine) -> Verdict:
    """`sync.transport` goes between GPUs, and as far as the run's machines are apart."""
    asked = on_gpus(machine)
    if isinstance(asked, Verdict):
        return asked
    if asked.transport is None:
        return verdict.ok("weights are broadcast over NCCL")
    several = machine.run is not None and machine.run.several_machines
    shared = any(wanted.share for wanted in asked.places)
    try:
        return verdict.ok(f"weights travel over {transport_for(asked.transport, gpu=True, together=not several, shared=shared)}")
    except ConfigError as error:
        return verdict.refused(error, "leave it out: auto chooses what goes there")


def megatron_switches(machine: Machine) -> Verdict:
    """`trainer.megatron` asks for nothing that this machine lacks."""
    asked = on_gpus(machine)
    if isinstance(asked, Verdict):
        return asked
    if asked.features is None:
        return verdict.ok("none is set")
    try:
        on = switches.decide(MegatronSection.model_validate(dict(asked.megatron)), kernels(machine), asked.features)
    except ConfigError as error:
        return verdict.refused(error)
    return verdict.ok(f"{len(on.off)} are off here, which the trainer's log explains" if on.off else "all are on")


def kernels(machine: Machine) -> Kernels:
    """The optional kernels as `asyncmoe.platform.kernels.detect` would find them in the trainer's process."""
    trainer, first = machine.trainer, next(iter(cards.of(machine)), None)
    major, _, minor = (first.capability if first is not None and first.capability else "0.0").partition(".")
    return Kernels(
        cuda=True,
        capability=(int(major), int(minor)),
        transformer_engine=release(trainer.packages.get("transformer-engine", "")) if "transformer-engine" in trainer.packages else (),
        apex=trainer.apex is not None and trainer.apex.nvidia,
        deep_ep=trainer.deep_ep,
    )


def on_gpus(machine: Machine) -> OnGpus | Verdict:
    """What the configuration asks of the GPUs, or what to say where it asks nothing."""
    if not machine.nvidia.present:
        return verdict.absent("there is no GPU; runs on the CPU work without")
    if machine.run is None or machine.run.trouble is not None:
        return verdict.absent("no valid configuration was given")
    if machine.run.on_gpus is None:
        return verdict.absent("the configuration does not suit its model", "see the line model")
    if cards.seen(machine) == 0:
        return verdict.absent("torch sees no GPU", "see the line cuda")
    return machine.run.on_gpus


def placement(machine: Machine) -> Verdict:
    """Every process of the run has a GPU that is its own, or shared on purpose, free, and like the others of its group."""
    asked = on_gpus(machine)
    if isinstance(asked, Verdict):
        return asked
    if asked.float32 is not None:
        found, _, expected = asked.float32.partition(", expected ")
        return verdict.error(
            found.replace(": got ", ": ", 1), "set engines.dtype=bfloat16 and trainer.dtype=bfloat16", expected or "bfloat16"
        )
    visible, fitting = cards.of(machine), cards.taken(machine)
    refusals: list[ConfigError] = []
    for wanted in asked.places:
        try:
            place(wanted, len(visible), cards.hidden(machine.nvidia, len(visible)))
        except ConfigError as error:
            refusals.append(error)
    if alone := _instance(asked, visible):
        return alone
    if not fitting:
        return _no_room(refusals)
    for _, devices in fitting:
        for refusal in _unusable(asked, devices, visible, machine):
            return refusal
    told = "; or ".join(_told(wanted, devices) for wanted, devices in fitting)
    if asked.trainer_nodes > 1 and machine.run is not None and not machine.run.several_machines:
        return verdict.warning(
            f"{told}; cluster.trainer_nodes is {asked.trainer_nodes}, but with cluster.network=loopback all of it is on this machine",
            "set cluster.trainer_nodes=1, or cluster.network to the network that nodes share",
        )
    return verdict.ok(told)


def gpu_memory(machine: Machine) -> Verdict:
    """What the run holds on each GPU fits, by the arithmetic of `asyncmoe plan`."""
    asked = on_gpus(machine)
    if isinstance(asked, Verdict):
        return asked
    if asked.trainer_bytes is None or asked.engine_bytes is None:
        return verdict.absent("the model is not known", "see the line model")
    visible, placed = cards.of(machine), cards.taken(machine)
    if not placed:
        return verdict.absent("not every process has a GPU", "see the line placement")
    known = [visible[number] for _, devices in placed for number in devices.taken if visible[number].memory_bytes]
    for card in known:
        for _, devices in placed:
            if found := _too_small(asked, card, devices):
                return found
    least = cards.smallest(known)
    if least is None:
        return verdict.absent("neither nvidia-smi nor torch says how much memory a process may have")
    parts = f"trainer {asked.trainer_bytes / 1e9:.3g} GB, engine at least {asked.engine_bytes / 1e9:.3g} GB"
    return verdict.ok(f"{parts} of {_usable(least) / 1e9:.3g} that can be planned for")


def _too_small(asked: OnGpus, card: GpuCard, devices: Devices) -> Verdict | None:
    """The refusal of a GPU that cannot hold its part; None: it can."""
    trainer = (asked.trainer_bytes or 0) if card.number in devices.trainer else 0
    engine = (asked.engine_bytes or 0) if any(card.number in one for one in devices.engines) else 0
    if trainer + engine <= _usable(card):
        return None
    whose = "the trainer and an engine" if trainer and engine else "the trainer" if trainer else "an engine"
    return verdict.error(
        f"{whose} would hold {(trainer + engine) / 1e9:.3g} GB of {labelled([card])}"
        + _largest(asked.trainer_parts if trainer >= engine else asked.engine_parts),
        _hint(asked, trainer, engine),
        f"at most {_usable(card) / 1e9:.3g}, as {1 - memory.USABLE:.0%} of its {(card.memory_bytes or 0) / 1e9:.3g} GB are left free",
    )


def _usable(card: GpuCard) -> int:
    """Bytes of a GPU that can be planned for."""
    return memory.usable((card.memory_bytes or 0) / 1e9)


def _largest(parts: Mapping[str, int]) -> str:
    """` (most of it weight sync, 60 GB)`; "" where parts are not known."""
    name = max(parts, key=lambda one: parts[one], default="")
    return f" (most of it {name}, {parts[name] / 1e9:.3g} GB)" if name else ""


def _instance(asked: OnGpus, visible: Sequence[GpuCard]) -> Verdict | None:
    """The refusal of a run that needs more than the single MIG instance that CUDA shows a process."""
    if not any(card.instance for card in visible):
        return None
    needed = min(len(wanted.devices.taken) for wanted in asked.places)
    if needed < 2:
        return None
    return verdict.error(
        f"a MIG instance, and CUDA shows a process one instance only, while the run takes {needed} GPUs",
        "choose whole GPUs (nvidia-smi -mig 0, as root, or CUDA_VISIBLE_DEVICES), or share the instance: examples/demo-gpu.yaml",
        f"{counted(needed)} without MIG",
    )


def _no_room(refusals: Sequence[ConfigError]) -> Verdict:
    """The refusal where no part of the run finds its GPUs."""
    last = refusals[-1]
    if len(refusals) == 1:
        return verdict.refused(last)
    return verdict.error(
        f"neither the trainer's part nor the engines' finds its GPUs: {last.what}: {last.got}",
        f"take fewer on each node (cluster.trainer_nodes, cluster.engine_nodes), or {last.hint}",
        str(last.expected),
    )


def _unusable(asked: OnGpus, devices: Devices, visible: Sequence[GpuCard], machine: Machine) -> Iterator[Verdict]:
    """What keeps processes from these GPUs, the worst first."""
    if used := [visible[device] for device in devices.taken if visible[device].used_mib]:
        most = max(card.used_mib for card in used)
        yield verdict.error(
            f"other processes use up to {most} MiB of {labelled(used)}, which the run would take",
            "nvidia-smi says which; end them, or choose others with CUDA_VISIBLE_DEVICES",
            "GPUs that nobody else uses",
        )
    for who, group in (("the trainer", devices.trainer), *((f"engine {i}", engine) for i, engine in enumerate(devices.engines))):
        if len(kinds := cards.kinds(visible[device] for device in group)) > 1:
            yield verdict.error(
                f"{who} would compute on {' and '.join(kinds)}",
                "choose alike ones with CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER=PCI_BUS_ID",
                "GPUs of one kind in a group",
            )
    torch = machine.trainer.torch
    apart = {frozenset(pair) for pair in torch.apart} if torch is not None else set()
    engines = [device for engine in devices.engines for device in engine]
    if asked.way == "ipc" and (pair := next(((t, e) for t in devices.trainer for e in engines if frozenset((t, e)) in apart), None)):
        yield verdict.error(
            f"GPUs {visible[pair[0]].label} and {visible[pair[1]].label} do not reach each other's memory, "
            "which weights travel by (CUDA IPC)",
            "set sync.transport=nccl, or look at nvidia-smi topo -p2p r and at access control in the PCI bridges (ACS)",
        )


def _told(wanted: Wanted, devices: Devices) -> str:
    parts = []
    if devices.trainer:
        parts.append(f"trainer on {named(devices.trainer)}")
    if devices.engines:
        each = ", ".join(str(engine[0]) if len(engine) == 1 else f"{engine[0]}-{engine[-1]}" for engine in devices.engines)
        parts.append(f"{counted(wanted.engines, 'engine')} on GPU {each}")
    return ", ".join(parts) + (f", {named(devices.shared)} shared on purpose" if devices.shared else "")


def _hint(asked: OnGpus, trainer: int, engine: int) -> str:
    """Args:
    trainer, engine: bytes of each on the GPU; 0: it is not there.
    """
    dominating = (
        *(relief.of_trainer(asked.trainer_parts, engine) if trainer else ()),
        *(relief.of_engine(asked.engine_parts, trainer) if engine else ()),
    )
    usual: tuple[str, ...] = ("a larger engines.tp on more GPUs", _TOKENS)
    if trainer and engine:
        usual = ("more GPUs and engines.share_gpus=false", "fewer tokens (trainer.tokens_per_microbatch)")
    elif trainer:
        usual = ("more trainer.ranks", "trainer.recompute=full", "fewer trainer.tokens_per_microbatch")
    return f"take {', or '.join(relief.joined(dominating, usual))}; see asyncmoe plan --config"


_TOKENS = "fewer tokens (engines.max_total_tokens, environment.max_tokens)"
