"""What to know before believing a speed-up: where an assumption of the laws does not hold, and what was sampled for nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
    policies = {
        "tail_batching": plant.tail_batching > 1,
        "engines.order": engines.order not in ("arrival", "fifo"),
        "engines.balance": engines.balance != "least_loaded",
    }
    if not (asked := [f"{key}={value_of(plant, key)}" for key, is_on in policies.items() if is_on]):
        return ""
    verb = "hold" if len(asked) > 1 else "holds"
    return f"{listed(asked)} {verb} for the synchronous baseline too; without a policy of scheduling it is slower, and speed-ups are larger"


def _lost(run: SimulatedRun) -> str:
    if not run.lost:
        return ""
    return f"{run.mode} lost {percent(run.lost)} of what it started (dropped or rejected); its speed-up counts only what was trained"


_OF_STEPS = ("trainer.step_s", "sync.seconds", "sync.pause_s")
_OF_GROUPS = ("scoring.seconds", "scoring.sigma", "prompt_tokens")
"""Keys whose values a run's steps tell, and its kept groups."""


def of_trace(run: RecordedRun, plant: Plant, given: Sequence[str]) -> tuple[str, ...]:
    """Return a sentence for each kind of records that a run lacks, which names the keys whose values are the plant's therefore.

    Args:
        plant: with the run's records in it.
        given: keys that the command line sets.
    """
    missing = {
        "no steps of reinforcement learning" if not run.steps else "steps that do not tell them": _OF_STEPS,
        "no kept groups" if not run.groups else "kept groups that do not tell them": _OF_GROUPS,
    }
    found = []
    for why, keys in missing.items():
        if lacking := [f"{key}={value_of(plant, key)}" for key in keys if key not in run.keys and key not in given]:
            verb, they = ("are", "measure them, and give them") if len(lacking) > 1 else ("is", "measure it, and give it")
            found.append(f"{listed(lacking)} {verb} the plant's, not the run's: {run.path} has {why}; {they} as KEY=VALUE")
    return (*run.notes, *found)


def listed(words: Sequence[str]) -> str:
    """Return words as a list for people: "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def value_of(plant: Plant, key: str) -> Any:
    """Return the value of a key such as `engines.count`; numbers as short as they can be written."""
    value: Any = plant
    for name in key.split("."):
        value = getattr(value, name)
    return format(value, "g") if isinstance(value, float) else value
