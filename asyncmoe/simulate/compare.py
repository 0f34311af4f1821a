"""Compare modes on the same resources, and with the law's bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asyncmoe.simulate import laws
from asyncmoe.simulate.plant import MODES, Mode, Plant
from asyncmoe.simulate.simulation import simulate
from asyncmoe.simulate.state import SimulatedRun
from asyncmoe.simulate.workload import Workload
from asyncmoe.telemetry.format import percent


@dataclass(frozen=True)
class Baseline:
    """A synchronous run, in the symbols of `asyncmoe.simulate.laws`.

    Attributes:
        step_s: seconds of a step, weight sync included.
        s_pools: the largest speed-up of asynchrony in the same two pools, including the cost of weight sync.
        engine_gpus: number of GPUs that should generate, by the law.
    """

    step_s: float
    t_gen: float
    t_train: float
    t_sync: float
    e: float
    s_pools: float
    engine_gpus: float


@dataclass(frozen=True)
class ModeComparison:
    """A mode compared with the baseline.

    Attributes:
        speedup: over synchronous steps in the same two pools.
        efficiency: speedup divided by `Baseline.s_pools`.
    """

    outcome: SimulatedRun
    speedup: float
    efficiency: float


@dataclass(frozen=True)
class Comparison:
    """The result of `asyncmoe simulate`.

    Attributes:
        cautions: caveats about the figures, one sentence each.
    """

    workload: str
    plant: dict[str, Any]
    gpus: int
    pools: Baseline
    rows: dict[Mode, ModeComparison]
    cautions: tuple[str, ...]


def baseline(plant: Plant, outcome: SimulatedRun) -> Baseline:
    """Return the baseline of a plant from its synchronous run."""
    t_gen, t_train, t_sync = outcome.wait_s - outcome.sync_s, outcome.train_s, outcome.sync_s
    e = outcome.tokens / plant.full_rate / t_gen
    pause_s = min(plant.sync.pause_s, t_sync)
    return Baseline(
        step_s=outcome.step_s,
        t_gen=t_gen,
        t_train=t_train,
        t_sync=t_sync,
        e=e,
        s_pools=laws.s_pools(t_gen, t_train, e, t_sync - pause_s, pause_s),
        engine_gpus=laws.best_share(t_gen * plant.engine_gpus, t_train * plant.trainer.gpus, e) * plant.gpus,
    )


def compare(plant: Plant, workload: Workload) -> Comparison:
    """Simulate all modes.

    Raises:
        InvariantBroken: see `simulate`.
    """
    outcomes = {mode: simulate(plant, workload, mode) for mode in MODES}
    pools = baseline(plant, outcomes["sync"])
    speedups = {mode: pools.step_s / outcome.step_s for mode, outcome in outcomes.items()}
    rows = {mode: ModeComparison(outcome, speedups[mode], speedups[mode] / pools.s_pools) for mode, outcome in outcomes.items()}
    return Comparison(workload.name, plant.model_dump(mode="json"), plant.gpus, pools, rows, tuple(_cautions(plant, pools.t_gen, outcomes)))


def _cautions(plant: Plant, t_gen: float, outcomes: Mapping[Mode, SimulatedRun]) -> Iterator[str]:
    """Yield caveats about a speed-up: the laws' assumptions that do not hold, and samples that were wasted."""
    slots = plant.engines.count * plant.engines.max_running
    if plant.batch < slots:
        yield (
            f"a batch of {plant.batch:,} responses does not fill the engines' {slots:,} slots: synchronous engines are never full, and the "
            "speed-ups called possible are too high"
        )
    if (steps := t_gen / outcomes["async"].step_s) > plant.max_staleness:
        yield (
            f"the longest responses last {steps:.1f} steps, more than max_staleness = {plant.max_staleness}: engines wait, or long "
            "responses are dropped"
        )
    for mode, run in outcomes.items():
        if run.lost:
            yield f"{mode} lost {percent(run.lost)} of what it started; its speed-up counts only what was trained"
