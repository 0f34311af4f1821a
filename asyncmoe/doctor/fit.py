"""Checks of a configuration on this machine's GPUs: Megatron's switches, placement and memory.

The checks call the functions that decide at the start of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from asyncmoe.config import sglang_arguments
from asyncmoe.config.devices import Devices, Wanted, counted, named, place
from asyncmoe.config.transports import TRANSPORTS
from asyncmoe.doctor import cards, finding
from asyncmoe.doctor.cards import labelled
from asyncmoe.doctor.facts import Machine
from asyncmoe.doctor.finding import Finding
from asyncmoe.doctor.gpus import NO_GPU
from asyncmoe.doctor.planned import PlannedRun
from asyncmoe.errors import ConfigError
from asyncmoe.plan import relief
from asyncmoe.trainer.model import switches

TAKES_FLOAT32 = frozenset({"triton", "torch_native", "flex_attention"})
"""SGLang's attention backends that support float32. SGLang's default does not: on Hopper it is fa3 (sglang 0.5.23,
arg_groups/model_override_base.py), which supports float16, bfloat16 and float8."""


def _of_run(check: Callable[[Machine, PlannedRun], Finding]) -> Callable[[Machine], Finding]:
    """Wrap a check: run it only if there are GPUs and a run that uses them, and report what the run's own functions refuse."""

    @wraps(check)
    def checked(machine: Machine) -> Finding:
        if not machine.nvidia.present:
            return finding.absent(NO_GPU)
        if machine.run is None:
            return finding.absent("no valid configuration was given", "see the line configuration")
        if not cards.of(machine):
            return finding.absent("torch sees no GPU", "see the line cuda")
        try:
            return check(machine, machine.run)
        except ConfigError as error:
            return finding.refused(error)

    return checked


@_of_run
def megatron_switches(machine: Machine, run: PlannedRun) -> Finding:
    """Check that `trainer.megatron` asks for nothing that this machine lacks."""
    if machine.trainer.kernels is None:
        return finding.absent("this machine's packages and GPUs are not known", "see the line torch")
    on = switches.decide(run.config.trainer, machine.trainer.kernels, switches.run_features(run.hf, run.config, run.trainer_float32))
    return finding.ok(on.text)


@_of_run
def placement(machine: Machine, run: PlannedRun) -> Finding:
    """Check that every process has a GPU, its own or in turn, and that a transport connects the GPUs (and the machines, if there
    are several) that exchange weights."""
    way = run.way()
    backend = sglang_arguments.value(run.config.engines.args, "--attention-backend")
    if run.engine_dtype == "float32" and backend not in TAKES_FLOAT32:
        what = "engines.dtype: float32, which SGLang's attention on GPUs does not support"
        return finding.error(what, "set engines.dtype=bfloat16 and trainer.dtype=bfloat16", "bfloat16")
    visible, placed = cards.of(machine), cards.taken(machine)
    if not placed:
        place(run.wanted[0], len(visible), cards.hidden(machine.nvidia, len(visible)))
    apart = {frozenset(pair) for pair in machine.trainer.torch.apart} if machine.trainer.torch is not None else set()
    for _, devices in placed if way in TRANSPORTS and TRANSPORTS[way].reads_sender else ():
        pairs = [(rank, gpu) for rank in devices.trainer for engine in devices.engines for gpu in engine]
        if far := next((pair for pair in pairs if frozenset(pair) in apart), None):
            return finding.error(
                f"{labelled([visible[one] for one in far])} cannot access each other's memory, as sending weights over {way} requires",
                "set sync.transport=nccl with placement=split, or look at nvidia-smi topo -p2p r and access control of PCI bridges (ACS)",
            )
    return finding.ok(f"{'; or '.join(_told(wanted, devices) for wanted, devices in placed)}; weights go over {way}")


def _told(wanted: Wanted, devices: Devices) -> str:
    engines = tuple(device for engine in devices.engines for device in engine)
    parts = [f"trainer on {named(devices.trainer)}"] if devices.trainer else []
    parts += [f"{counted(wanted.engines, 'engine')} on {named(engines)}"] if engines else []
    return ", ".join(parts) + (f", in turn on {named(devices.shared)}" if devices.shared else "")


@_of_run
def gpu_memory(machine: Machine, run: PlannedRun) -> Finding:
    """Check that the run's memory on each GPU fits, by the arithmetic of `asyncmoe plan`."""
    from asyncmoe.plan import budget

    visible, (trainer, engine) = cards.of(machine), budget.least(run.config, run.hf)
    for _, devices in cards.taken(machine):
        for card in (visible[number] for number in devices.taken if visible[number].memory_mib):
            mine = trainer if card.number in devices.trainer else relief.NOTHING
            others = engine if any(card.number in one for one in devices.engines) else relief.NOTHING
            gpu_gb = (card.memory_mib << 20) / 1e9
            for refusal in budget.Budget(mine, others, gpu_gb, phases=budget.by_phase(run.config, [mine], others)).refusals:
                raise ConfigError(f"memory of {labelled([card])}", got=refusal.got, expected=refusal.expected, hint=refusal.hint)
    return finding.ok(f"trainer {trainer.total / 1e9:.3g} GB, engine at least {engine.total / 1e9:.3g} GB")
