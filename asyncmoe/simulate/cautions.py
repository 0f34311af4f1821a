"""What to know before believing a speed-up: where an assumption of the laws does not hold, and what was sampled for nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncmoe.simulate.plant import Plant
from asyncmoe.simulate.recorded import RecordedRun
from asyncmoe.simulate.trace import SimulatedRun
from asyncmoe.telemetry.format import percent


def cautions(plant: Plant, t_gen: float, outcomes: Mapping[str, SimulatedRun]) -> tuple[str, ...]:
    """Return a sentence for each.

    Args:
        t_gen: seconds in which the same engines generate a batch in a synchronous step.
        outcomes: the simulated modes by name.
    """
    found = [_slots(plant), _long(plant, t_gen, outcomes), *map(_lost, outcomes.values())]
    return tuple(sentence for sentence in found if sentence)


def _slots(plant: Plant) -> str:
    slots = plant.engines.count * plant.engines.max_running
    if plant.batch >= slots:
        return ""
    return (
        f"a batch of {plant.batch:,} responses does not fill the engines' {slots:,} slots, as the laws assume: synchronous engines are "
        "never full, and the bounds are too high"
    )


def _long(plant: Plant, t_gen: float, outcomes: Mapping[str, SimulatedRun]) -> str:
    if "async" not in outcomes or (steps := t_gen / outcomes["async"].step_s) <= plant.max_staleness:
        return ""
    return (
        f"the longest responses last {steps:.1f} steps, more than max_staleness = {plant.max_staleness}, which the laws take to be large "
        "enough: engines wait, or long responses are dropped"
    )


def _lost(run: SimulatedRun) -> str:
    if not run.lost:
        return ""
    return f"{run.mode} lost {percent(run.lost)} of what it started; its speed-up counts only what was trained"


_RECORDED = ("trainer.step_s", "sync.seconds", "sync.pause_s", "scoring.seconds", "scoring.sigma")
"""Keys whose values are in the records of a run."""


def of_trace(run: RecordedRun, plant: Plant, given: Sequence[str]) -> tuple[str, ...]:
    """Return a sentence that names keys whose values are the plant's, because a run's records lack them; () if there are none.

    Args:
        plant: with the run's records in it.
        given: keys that the command line sets.
    """
    lacking = [f"{key}={plant.value(key):g}" for key in _RECORDED if key not in run.keys and key not in given]
    found = f"of the plant, not of the run: {', '.join(lacking)}, which {run.path} does not tell; measure, and give each as KEY=VALUE"
    return (found,) if lacking else ()
