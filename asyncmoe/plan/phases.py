"""The memory of a device that a trainer rank and an engine rank use in turn: in each phase one holds all of its memory, or both hold what a
weight update needs (`asyncmoe.occupancy.HOLDS`). A process that sleeps keeps what nobody takes off the device: message buffers, float8
copies of weights, an engine's adapter slots, and what `trainer.sleep` leaves out.

Sources: `asyncmoe.trainer.model.sleep`; for engines SGLang 0.5.23, which allocates weights in a region of its memory saver
(model_executor/model_runner_components/load_model_utils.py), adapter slots outside (lora/mem_pool.py), and returns the allocator's free
memory when the cache goes (`flush_cache` of managers/scheduler.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncmoe.occupancy import HOLDS, DeviceTurn, Held, MemoryPart
from asyncmoe.plan.memory import ASLEEP, GpuMemory

SLEEPS = frozenset({"optimizer", "gradients", "parameters"})
"""What a sleeping trainer takes off its device, by the names of `trainer.sleep`."""
CHOSEN = {"weights": "parameters", "adapters": "parameters", "gradients": "gradients", "optimizer": "optimizer"}
"""By part, its name in `trainer.sleep`."""
_BRIEF = ("activations", "working set", "checkpoint copy")
"""Parts that end with the step anyway."""
_ENGINE = {"weights": MemoryPart.WEIGHTS, "derived": MemoryPart.WEIGHTS, "KV cache": MemoryPart.CACHE, "working set": MemoryPart.CACHE}

Sides = tuple[GpuMemory, GpuMemory]
"""Memory of a trainer rank and of an engine rank."""
Phases = Mapping[DeviceTurn, Sides]


def phases(stages: Sequence[GpuMemory], engine: GpuMemory, sleeps: frozenset[str] = SLEEPS, cpu: bool = False) -> Phases:
    """Return what both hold at once, by phase.

    Args:
        stages: memory of a rank of each pipeline stage; the largest counts.
        cpu: a reference policy stays in memory; on a GPU it is there only for its forward passes.
    """
    goes = dict.fromkeys(_BRIEF if cpu else (*_BRIEF, "reference"), MemoryPart.STATE)
    goes["copies to send"] = MemoryPart.PARAMETERS
    chosen = [part for part, name in CHOSEN.items() if name in sleeps]
    sent = {"adapters" if any("adapters" in one.parts for one in stages) else "weights"}
    goes |= {part: MemoryPart.PARAMETERS if part in sent else MemoryPart.STATE for part in chosen}
    context, found = {} if cpu else {"context": ASLEEP}, {}
    for turn in (DeviceTurn.GENERATING, DeviceTurn.TRAINING, DeviceTurn.WAKING):
        mine, theirs = (context, {}) if turn is DeviceTurn.GENERATING else ({}, context)
        trainers = [_held(one, goes, HOLDS[turn], mine) for one in stages]
        found[turn] = max(trainers, key=lambda one: one.total), _held(engine, _ENGINE, HOLDS[turn], theirs)
    return found


def moved(stage: GpuMemory, sleeps: frozenset[str] = SLEEPS) -> int:
    """Return the bytes of a trainer rank that go to host memory and come back; gradients are dropped."""
    return sum(stage.parts.get(part, 0) for part, name in CHOSEN.items() if name in sleeps and name != "gradients")


def changed(stage: GpuMemory, sleeps: frozenset[str] = SLEEPS) -> int:
    """Return the bytes of these that go there at each switch: all but weights under adapters, which never change."""
    return moved(stage, sleeps) - (stage.parts["weights"] if "adapters" in stage.parts and CHOSEN["weights"] in sleeps else 0)


def backup(engine: GpuMemory) -> int:
    """Return the bytes of an engine rank's weights that come back from host memory (--enable-weights-cpu-backup): where only adapters
    are sent, all."""
    return engine.parts["weights"] + engine.parts.get("derived", 0) if "adapters" in engine.parts else 0


def _held(whole: GpuMemory, goes: Mapping[str, MemoryPart], allowed: Held, besides: Mapping[str, int]) -> GpuMemory:
    return GpuMemory({**{part: size for part, size in whole.parts.items() if part not in goes or goes[part] in allowed}, **besides})
