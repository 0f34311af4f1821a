"""Comparison of modes on the same resources, and with the bounds of the laws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncmoe.simulate import laws
from asyncmoe.simulate.cautions import cautions
from asyncmoe.simulate.plant import Mode, Plant
from asyncmoe.simulate.simulation import simulate
from asyncmoe.simulate.trace import SimulatedRun
from asyncmoe.simulate.workload import Workload


@dataclass(frozen=True)
class Baseline:
    """A synchronous run, in the symbols of `asyncmoe.simulate.laws`.

    Attributes:
        step_s: seconds of a step, weight sync included.
        gpus: GPUs that generate and GPUs that train; in one pool these are the same GPUs.
    """

    gpus: tuple[int, int]
    step_s: float
    t_gen: float
    t_train: float
    t_sync: float
    g: float
    e: float


@dataclass(frozen=True)
class ModeComparison:
    """A mode compared with both baselines.

    Attributes:
        speedup: over synchronous steps in the same two pools.
        efficiency: speedup divided by S_pools.
        speedup_one_pool: over synchronous steps that use all GPUs for either phase in turn.
        efficiency_one_pool: speedup_one_pool divided by S_max, the bound for the best split of the GPUs.
    """

    outcome: SimulatedRun
    speedup: float
    efficiency: float
    speedup_one_pool: float
    efficiency_one_pool: float


@dataclass(frozen=True)
class Comparison:
    """The result of `asyncmoe simulate`.

    Attributes:
        best_engine_gpus: number of GPUs that should generate, by the law for one pool.
        cautions: where the figures need care, a sentence each.
    """

    workload: str
    plant: dict[str, Any]
    gpus: int
    pools: Baseline
    one_pool: Baseline
    s_pools: float
    s_max: float
    best_engine_gpus: int
    rows: dict[str, ModeComparison]
    cautions: tuple[str, ...]


def one_pool(plant: Plant, workload: Workload) -> Baseline:
    """Simulate synchronous training that uses all GPUs of both pools for each phase in turn; switching phases costs nothing."""
    engines = max(1, plant.gpus // plant.engines.gpus)
    whole = plant.having({"engines.count": engines, "queue_capacity": None, **plant.with_trainer(plant.gpus)})
    return _baseline(whole, simulate(whole, workload, "sync"), (plant.gpus, plant.gpus))


def two_pools(plant: Plant, outcome: SimulatedRun) -> Baseline:
    """Return the baseline of the same two pools, from a synchronous run of the plant."""
    return _baseline(plant, outcome, (plant.engine_gpus, plant.trainer.gpus))


def _baseline(plant: Plant, outcome: SimulatedRun, gpus: tuple[int, int]) -> Baseline:
    t_gen = outcome.wait_s - outcome.sync_s
    g = laws.share(t_gen, outcome.train_s)
    return Baseline(gpus, outcome.step_s, t_gen, outcome.train_s, outcome.sync_s, g, outcome.tokens / plant.full_rate / t_gen)


def compare(plant: Plant, workload: Workload, modes: Sequence[Mode], whole: Baseline | None = None) -> Comparison:
    """Simulate `modes` and the two synchronous baselines; `whole` is the one-pool baseline, if already known.

    Raises:
        InvariantBroken: see `simulate`.
    """
    whole = whole or one_pool(plant, workload)
    outcomes: dict[str, SimulatedRun] = {}
    wanted: tuple[Mode, ...] = ("sync", *(mode for mode in modes if mode != "sync"))
    for mode in wanted:
        outcomes[mode] = simulate(plant if mode == "async" else plant.having({"queue_capacity": None}), workload, mode)
    pools = two_pools(plant, outcomes["sync"])
    pause_s = min(plant.sync.pause_s, pools.t_sync)
    s_pools = laws.s_pools(pools.t_gen, pools.t_train, pools.e, pools.t_sync - pause_s, pause_s)
    s_max = laws.s_max(whole.g, whole.e)
    best = laws.best_share(whole.t_gen, whole.t_train, whole.e) * plant.gpus / plant.engines.gpus
    rows = {
        mode: ModeComparison(
            outcome,
            pools.step_s / outcome.step_s,
            pools.step_s / outcome.step_s / s_pools,
            whole.step_s / outcome.step_s,
            whole.step_s / outcome.step_s / s_max,
        )
        for mode, outcome in outcomes.items()
    }
    engines = max(1, round(best))
    return Comparison(
        workload=workload.name,
        plant=plant.described(),
        gpus=plant.gpus,
        pools=pools,
        one_pool=whole,
        s_pools=s_pools,
        s_max=s_max,
        best_engine_gpus=engines * plant.engines.gpus,
        rows=rows,
        cautions=cautions(plant, pools.t_gen, outcomes),
    )
