"""Sweep over splits of one cluster and over max_staleness, to find how many GPUs should generate and which max_staleness to choose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from asyncmoe.simulate.compare import baseline
from asyncmoe.simulate.plant import Plant
from asyncmoe.simulate.simulation import simulate
from asyncmoe.simulate.state import SimulatedRun
from asyncmoe.simulate.workload import Workload

BOUNDS = frozenset({1, 2, 4, 8})
"""Values of max_staleness to try in addition to the plant's."""
_SPLITS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5)
"""Ratios of generating to training GPUs to try, relative to the law's ratio."""
_AS_FAST = 1.03


@dataclass(frozen=True)
class Point:
    """One split and one max_staleness.

    Attributes:
        speedup, s_pools: speed-up over synchronous steps in the same two pools, and the largest possible.
    """

    engine_gpus: int
    trainer_gpus: int
    speedup: float
    s_pools: float
    outcome: SimulatedRun


@dataclass(frozen=True)
class Sweep:
    """The result of `asyncmoe simulate --sweep`.

    Attributes:
        law_engine_gpus: number of GPUs that should generate, by the law.
        fastest: the point with the shortest step.
        advised: among the points whose step is at most 3 % longer, the fastest one with the smallest max_staleness, because older
            trajectories are worse to learn from.
    """

    workload: str
    plant: dict[str, Any]
    gpus: int
    law_engine_gpus: float
    points: tuple[Point, ...]
    fastest: Point
    advised: Point


def sweep(plant: Plant, workload: Workload) -> Sweep:
    """Simulate splits around the law's best, each with several staleness bounds. Every split does the same work per training step.

    Raises:
        InvariantBroken: see `asyncmoe.simulate.simulation.simulate`.
    """
    best = baseline(plant, simulate(plant, workload, "sync")).engine_gpus
    points = tuple(point for part in _splits(plant, best) for point in _points(part, workload))
    fastest = min(points, key=lambda point: point.outcome.step_s)
    as_fast = [point for point in points if point.outcome.step_s <= _AS_FAST * fastest.outcome.step_s]
    advised = min(as_fast, key=lambda point: (point.outcome.max_staleness, point.outcome.step_s))
    return Sweep(workload.name, plant.model_dump(mode="json"), plant.gpus, best, points, fastest, advised)


def _splits(plant: Plant, best: float) -> list[Plant]:
    """Return the plant, and others that give the trainer a multiple of its least size. The trainer's step time is inversely proportional to
    its GPUs."""
    each, least = plant.engines.gpus, plant.trainer.least_gpus
    sizes = {plant.trainer.gpus: plant.engines.count}
    for share in (factor * best / (factor * best + plant.gpus - best) for factor in _SPLITS):
        rest = plant.gpus - max(1, round(share * plant.gpus / each)) * each
        trainer_gpus = max(least, rest // least * least)
        if engines := (plant.gpus - trainer_gpus) // each:
            sizes.setdefault(trainer_gpus, engines)
    speed = plant.trainer.step_s * plant.trainer.gpus
    return [
        plant.having({"engines.count": engines, "trainer.gpus": gpus, "trainer.step_s": speed / gpus})
        for gpus, engines in sorted(sizes.items(), reverse=True)
    ]


def _points(plant: Plant, workload: Workload) -> Iterator[Point]:
    pools = baseline(plant, simulate(plant, workload, "sync"))
    for bound in sorted(BOUNDS | {plant.max_staleness}):
        outcome = simulate(plant.having({"max_staleness": bound}), workload)
        yield Point(plant.engine_gpus, plant.trainer.gpus, pools.step_s / outcome.step_s, pools.s_pools, outcome)
