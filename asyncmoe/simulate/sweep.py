"""Sweep over splits of one cluster and over max_staleness: how many GPUs should generate, and which max_staleness to choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncmoe.simulate import laws
from asyncmoe.simulate.compare import Baseline, Comparison, compare, one_pool
from asyncmoe.simulate.plant import Plant
from asyncmoe.simulate.workload import Workload

_SPLITS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5)
"""Ratios of generating to training GPUs to try, relative to the law's ratio."""
_AS_FAST = 1.03


@dataclass(frozen=True)
class Point:
    """One split and one max_staleness. Speed-ups as in `asyncmoe.simulate.compare.ModeComparison`."""

    engine_gpus: int
    trainer_gpus: int
    max_staleness: int
    step_s: float
    speedup: float
    s_pools: float
    speedup_one_pool: float
    trainer_idle: float
    engine_idle: float
    mean_age: float
    oldest_age: int
    lost: float


@dataclass(frozen=True)
class Sweep:
    """The result of `asyncmoe simulate --sweep`.

    Attributes:
        fastest: the point with the shortest step.
        advised: among the points whose step is at most 3 % longer, the fastest one with the smallest max_staleness, because older
            trajectories are worse to learn from.
        cautions: where the figures need care, a sentence each.
    """

    workload: str
    plant: dict[str, Any]
    gpus: int
    one_pool: Baseline
    s_max: float
    law_engine_gpus: float
    points: tuple[Point, ...]
    fastest: Point
    advised: Point
    cautions: tuple[str, ...] = ()


def sweep(plant: Plant, workload: Workload, bounds: Sequence[int]) -> Sweep:
    """Simulate splits around the law's best, each with all `bounds` of the staleness. Every split does the same work per training step.

    Raises:
        InvariantBroken: see `asyncmoe.simulate.simulation.simulate`.
    """
    whole = one_pool(plant, workload)
    best = laws.best_share(whole.t_gen, whole.t_train, whole.e) * plant.gpus
    points = tuple(
        _point(bound, compare(part.having({"max_staleness": bound}), workload, ("async",), whole))
        for part in _splits(plant, best)
        for bound in bounds
    )
    fastest = min(points, key=lambda point: point.step_s)
    as_fast = [point for point in points if point.step_s <= _AS_FAST * fastest.step_s]
    return Sweep(
        workload=workload.name,
        plant=plant.described(),
        gpus=plant.gpus,
        one_pool=whole,
        s_max=laws.s_max(whole.g, whole.e),
        law_engine_gpus=best,
        points=points,
        fastest=fastest,
        advised=min(as_fast, key=lambda point: (point.max_staleness, point.step_s)),
    )


def _splits(plant: Plant, best: float) -> list[Plant]:
    most = (plant.gpus - 1) // plant.engines.gpus
    shares = [factor * best / (factor * best + plant.gpus - best) for factor in _SPLITS]
    counts = sorted({min(most, max(1, round(share * plant.gpus / plant.engines.gpus))) for share in shares})
    parts = []
    for engines in counts:
        trainer_gpus = plant.gpus - engines * plant.engines.gpus
        parts.append(plant.having({"engines.count": engines, "trainer.gpus": trainer_gpus, **plant.with_trainer(trainer_gpus)}))
    return parts


def _point(max_staleness: int, found: Comparison) -> Point:
    row = found.rows["async"]
    outcome = row.outcome
    return Point(
        engine_gpus=found.pools.gpus[0],
        trainer_gpus=found.pools.gpus[1],
        max_staleness=max_staleness,
        step_s=outcome.step_s,
        speedup=row.speedup,
        s_pools=found.s_pools,
        speedup_one_pool=row.speedup_one_pool,
        trainer_idle=outcome.trainer_idle,
        engine_idle=outcome.engine_idle,
        mean_age=sum(age * share for age, share in outcome.ages.items()),
        oldest_age=outcome.oldest_age,
        lost=outcome.lost,
    )
