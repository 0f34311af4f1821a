"""Checks of a configuration on this machine's GPUs: placement, memory, and access between GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from asyncmoe.config.devices import Devices, Wanted, counted, named, place
from asyncmoe.doctor import verdict
from asyncmoe.doctor.devices import IN_USE
from asyncmoe.doctor.facts import GpuFacts, Machine, OnGpus
from asyncmoe.doctor.verdict import Verdict
from asyncmoe.errors import ConfigError
from asyncmoe.plan import memory

_MIB = 1 << 20


def placement(machine: Machine) -> Verdict:
    """Check that every process of the run has a GPU, exclusive or shared by configuration, that is idle and of its group's kind."""
    asked = _asked(machine)
    if isinstance(asked, Verdict):
        return asked
    if asked.float32 is not None:
        return verdict.error(asked.float32, "set engines.dtype=bfloat16 and trainer.dtype=bfloat16")
    count, fitting, trouble = seen(machine), [], ""
    for wanted in asked.places:
        try:
            fitting.append((wanted, place(wanted, count)))
        except ConfigError as error:
            trouble = f"{error.what}: got {error.got}, expected {error.expected}"
            if len(asked.places) == 1:
                return verdict.error(trouble, error.cure or "")
    if not fitting:
        return verdict.error(f"neither the trainer's part nor the engines': {trouble}", "take fewer on each node: cluster.trainer_nodes")
    visible = machine.nvidia.visible
    for _, devices in fitting:
        for found in _unusable(asked, devices, visible if len(visible) == count else (), machine):
            return found
    return verdict.ok("; or ".join(_told(wanted, devices) for wanted, devices in fitting))


def gpu_memory(machine: Machine) -> Verdict:
    """Check that the run fits into a GPU's memory, by the arithmetic of `asyncmoe plan`."""
    asked = _asked(machine)
    if isinstance(asked, Verdict):
        return asked
    if asked.trainer_bytes is None or asked.engine_bytes is None:
        return verdict.absent("the model is not known", "see the line model")
    sizes = [gpu.memory_mib * _MIB for gpu in machine.nvidia.visible if gpu.memory_mib]
    if not sizes:
        return verdict.absent("nvidia-smi does not say how much memory a process may have")
    usable = memory.usable(min(sizes) / 1e9)
    for wanted in asked.places:
        trainer = asked.trainer_bytes if wanted.ranks else 0
        engine = asked.engine_bytes if wanted.engines else 0
        both = wanted.share and trainer and engine
        needed = trainer + engine if both else max(trainer, engine)
        if needed > usable:
            whose = "the trainer and an engine" if both else "the trainer" if trainer >= engine else "an engine"
            return verdict.error(
                f"{whose} would hold {needed / 1e9:.3g} GB of a GPU, of which {usable / 1e9:.3g} can be planned for",
                _cure(asked, bool(both), trainer >= engine),
            )
    parts = f"trainer {asked.trainer_bytes / 1e9:.3g} GB, engine at least {asked.engine_bytes / 1e9:.3g} GB"
    return verdict.ok(f"{parts} of {usable / 1e9:.3g} that can be planned for")


def seen(machine: Machine) -> int:
    """Return the number of GPUs that torch sees."""
    torch = machine.trainer.torch
    return torch.devices if torch is not None else 0


def _asked(machine: Machine) -> OnGpus | Verdict:
    if not machine.nvidia.present:
        return verdict.absent("there is no GPU; runs on the CPU work without")
    if machine.run is None or machine.run.trouble is not None:
        return verdict.absent("no valid configuration was given")
    if machine.run.on_gpus is None:
        return verdict.absent("the configuration does not suit its model", "see the line model")
    if seen(machine) == 0:
        return verdict.absent("torch sees no GPU", "see the line cuda")
    return machine.run.on_gpus


def _unusable(asked: OnGpus, devices: Devices, visible: tuple[GpuFacts, ...], machine: Machine) -> Iterator[Verdict]:
    """Yield the reasons why processes cannot use these GPUs, the most severe first."""
    if visible:
        if used := tuple(device for device in devices.taken if visible[device].used_mib > IN_USE * visible[device].memory_mib):
            most = max(visible[device].used_mib for device in used)
            yield verdict.error(
                f"other processes use up to {most} MiB of {named(used)}, which the run would take",
                "nvidia-smi says which; end them, or choose others with CUDA_VISIBLE_DEVICES",
            )
        for who, group in (("the trainer", devices.trainer), *((f"engine {i}", engine) for i, engine in enumerate(devices.engines))):
            if len(kinds := sorted({f"{visible[device].name} of {visible[device].memory_mib} MiB" for device in group})) > 1:
                yield verdict.error(
                    f"{who} would compute on {' and '.join(kinds)}, expected GPUs of one kind in a group",
                    "choose alike ones with CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER=PCI_BUS_ID",
                )
    torch = machine.trainer.torch
    apart = {frozenset(pair) for pair in torch.apart} if torch is not None else set()
    engines = [device for engine in devices.engines for device in engine]
    if asked.way == "ipc" and (pair := next(((t, e) for t in devices.trainer for e in engines if frozenset((t, e)) in apart), None)):
        yield verdict.error(
            f"GPUs {pair[0]} and {pair[1]} do not reach each other's memory, which weights travel by (CUDA IPC)",
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


def _cure(asked: OnGpus, both: bool, trainer: bool) -> str:
    if both:
        return "take more GPUs and engines.share_gpus=false, sync.staging=false, or fewer tokens (trainer.tokens_per_microbatch)"
    if trainer:
        return "take more trainer.ranks, trainer.recompute=full, or fewer trainer.tokens_per_microbatch; see asyncmoe plan --config"
    return "take sync.staging=false, a larger engines.tp on more GPUs, or fewer tokens (engines.max_total_tokens, environment.max_tokens)"
