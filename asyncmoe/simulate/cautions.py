"""What to know before believing a speed-up: where an assumption of the laws does not hold, and what was sampled for nothing."""

from __future__ import annotations

from collections.abc import Mapping

from asyncmoe.simulate.plant import Plant
from asyncmoe.simulate.trace import SimulatedRun
from asyncmoe.telemetry.format import percent


def cautions(plant: Plant, t_gen: float, outcomes: Mapping[str, SimulatedRun]) -> tuple[str, ...]:
    """Return a sentence for each.

    Args:
        t_gen: seconds in which the same engines generate a batch in a synchronous step.
        outcomes: the simulated modes by name.
    """
    found = [_slots(plant), _long(plant, t_gen, outcomes), _contexts(plant), _policies(plant), *map(_lost, outcomes.values())]
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


def _contexts(plant: Plant) -> str:
    if plant.context_costs is None and not plant.sync.recompute:
        return ""
    return "the laws count neither contexts, nor prefills, nor preemptions: engines never reach the rate that the bounds assume"


def _policies(plant: Plant) -> str:
    engines = plant.engines
    if plant.scaling.first is not None:
        return "engines come and go (scaling): the laws and the synchronous baselines take engines.count of them, or what is left of them"
    if plant.tail_batching == 1 and engines.order == "arrival" and engines.balance == "least_loaded":
        return ""
    return (
        "tail_batching, engines.order and engines.balance hold for the synchronous baseline too; without them it is slower, and speed-ups "
        "are larger"
    )


def _lost(run: SimulatedRun) -> str:
    if not run.lost:
        return ""
    return f"{run.mode} lost {percent(run.lost)} of what it started (dropped or rejected); its speed-up counts only what was trained"
