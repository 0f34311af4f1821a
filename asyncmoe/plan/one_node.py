"""`asyncmoe plan --nodes 1`: how a trainer and its engines use the GPUs of one machine, in turn or divided, and the seconds of a step.

In turn, each side has all GPUs and the room that the sleeping other side leaves it. Of the divisions, the fastest is taken, without state
in host memory if there is one: the GPUs are split as if every group of 1, 2, 4, ... of them were a node (`asyncmoe.plan.split.suggest`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from asyncmoe.errors import ConfigError
from asyncmoe.models import checks
from asyncmoe.occupancy import DeviceTurn
from asyncmoe.plan import memory
from asyncmoe.plan.memory import GpuMemory, Hf
from asyncmoe.plan.phases import backup, changed, moved, phases
from asyncmoe.plan.speeds import Measured
from asyncmoe.plan.split import Cluster, Split, best_trainer, engine_over, made, suggest
from asyncmoe.plan.switch import H100, moves
from asyncmoe.plan.traffic import Forecast


def of_node(hf: Hf, cluster: Cluster, measured: Measured | None = None) -> tuple[Split, ...]:
    """Return how one machine's GPUs are used in turn, and divided, as far as either fits.

    Raises:
        ConfigError: neither fits.
        UserError: unsupported model family.
    """
    found = [] if (one := _in_turn(hf, cluster, measured)) is None else [one]
    divided: list[Split] = []
    for gpus in checks.divisors(cluster.gpus)[:-1]:
        with suppress(ConfigError):
            divided += suggest(hf, replace(cluster, nodes=cluster.gpus // gpus, gpus=gpus, machine=True), measured)
    if divided:
        best = min(divided, key=lambda one: (one.trainer.offload, -min(one.trained, one.sampled)))
        found.append(replace(best, name="split"))
    if not found:
        got = f"{cluster.gpus} GPUs of {cluster.gpu_gb:g} GB"
        raise ConfigError(
            "--gpus-per-node",
            got=got,
            expected="room for trainer and engines",
            hint=f"take more GPUs, or {'--lora' if cluster.adapter is None else 'smaller adapters (experts=shared_outer)'}",
        )
    return tuple(found)


def _in_turn(hf: Hf, cluster: Cluster, measured: Measured | None) -> Split | None:
    shared = replace(cluster, machine=True, in_turn=True)
    if (engine := engine_over(hf, shared, 1)) is None:
        return None
    asleep = phases([GpuMemory({})], engine.memory)[DeviceTurn.TRAINING][1]
    if (trainer := best_trainer(hf, _beside(shared, asleep), 1)) is None:
        return None
    asleep = phases([trainer.memory], engine.memory)[DeviceTurn.GENERATING][0]
    if (engine := engine_over(hf, _beside(shared, asleep), 1)) is None:
        return None
    most = max(sum(one.total for one in sides) for sides in phases([trainer.memory], engine.memory).values())
    return made(hf, shared, (trainer, engine), "colocated", (1, 1, 1), measured) if most <= memory.usable(cluster.gpu_gb) else None


def _beside(cluster: Cluster, asleep: GpuMemory) -> Cluster:
    return replace(cluster, gpu_gb=cluster.gpu_gb - asleep.total / memory.USABLE / 1e9)


def seconds(one: Split, update: Forecast, tokens: float) -> Mapping[str, float]:
    """Return the seconds of a step that samples and trains so many tokens: in turn one after the other, with a switch; divided at the same
    time, with a pause for an update that engines do not stage."""
    parts = {"generation": tokens / one.sampled, "training": tokens / one.trained}
    if one.cluster.in_turn:
        switch = moves(moved(one.trainer.memory), changed(one.trainer.memory), backup(one.engine.memory), update, H100)
        parts["switch"] = sum(move.seconds for move in switch.values())
        return {**parts, "in all": sum(parts.values())}
    pause = 0.0 if one.engine.serving.staged else update.seconds
    return {**parts, "switch": pause, "in all": max(parts.values()) + pause}
