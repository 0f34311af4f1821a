"""What the seeds of an arm say together, as numbers: means with 95 % intervals, and what an arm changes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from benchmarks.learning.curves import band, reached

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""Records by the name of their arm."""
BASES = {"dense": "dense-async", "moe": "moe", "moe-small-steps": "moe-small-steps", "demo": "demo-split"}
"""What the name of an arm begins with -> the arm that it is compared with; the longest counts."""


def _step_seconds(run: Mapping[str, Any]) -> float:
    """Seconds of a step in the middle of the run, evaluations left out by the median."""
    return float(median(after - before for before, after in pairwise(run["seconds"])))


def _mean_of(name: str) -> Callable[[Mapping[str, Any]], float | None]:
    def of(run: Mapping[str, Any]) -> float | None:
        there = [value for value in run.get(name) or () if value is not None]
        return fmean(there) if there else None

    return of


FIGURES: Mapping[str, Callable[[Mapping[str, Any]], float | None]] = {
    "before": lambda run: run["evaluations"]["accuracy"][0],
    "after": lambda run: run["evaluations"]["accuracy"][-1],
    "curve": lambda run: fmean(run["evaluations"]["accuracy"][1:]),
    "tokens_per_s": lambda run: run["tokens_per_s"],
    "step_seconds": lambda run: _step_seconds(run) if len(run.get("seconds", ())) > 1 else None,
    "reward": lambda run: fmean(run["reward_mean"][-6:]) if run.get("reward_mean") else None,
    "kl": _mean_of("train_infer_kl"),
    "ess": _mean_of("ess"),
    "ess_least": lambda run: min((value for value in run.get("ess") or () if value is not None), default=None),
    "mismatch": _mean_of("routing_mismatch"),
    "age": _mean_of("staleness_mean"),
    "age_most": lambda run: max((value for value in run.get("staleness_mean") or () if value is not None), default=None),
}
"""Of one run: held-out accuracy before, after, and the mean of all evaluations but the first, which says more than the last alone; tokens a
second; seconds of a step; reward of the last six steps; means over the steps of KL(engine || trainer), effective sample size, share of
tokens that the trainer's router would send elsewhere, and age."""


def summary(by_arm: Runs, level: float) -> dict[str, dict[str, Any]]:
    """Return for each arm {"seeds", a figure: [mean, half of its 95 % interval] ..., "samples_to", "seconds_to": where accuracy first
    reaches `level`, "training_to": see `training_to`, "never": seeds that do not, "against": see `differences`}. A figure that a seed
    lacks is left out."""
    found: dict[str, dict[str, Any]] = {}
    for name, runs in by_arm.items():
        told: dict[str, Any] = {"seeds": len(runs)}
        told |= {figure: _band(values) for figure, of in FIGURES.items() if (values := _all([of(run) for run in runs]))}
        to = {axis: [to_level(run, axis, level) for run in runs] for axis in ("samples", "seconds")}
        told |= {f"{axis}_to": _band(there) for axis, values in to.items() if (there := [one for one in values if one is not None])}
        if there := [one for run in runs if (one := training_to(run, level)) is not None]:
            told["training_to"] = _band(there)
        told["never"] = to["samples"].count(None)
        found[name] = told
    for name, told in found.items():
        base = BASES[max((front for front in BASES if name.startswith(front)), key=len)]
        if base in by_arm and base != name and (against := differences(by_arm[name], by_arm[base], level)):
            told["against"] = against
    return found


def differences(runs: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]], level: float) -> dict[str, list[float]]:
    """Return what an arm changes, seed by seed, for the seeds that both have: {"seeds", "after", "curve": mean difference of the accuracy
    and half of its 95 % interval, "seconds_to", "training_to": the same of how many times as long it takes to `level`}."""
    of_base = {one["seed"]: one for one in base}
    pairs = [(one, of_base[one["seed"]]) for one in runs if one["seed"] in of_base]
    if not pairs:
        return {}
    found: dict[str, Any] = {"seeds": len(pairs)}
    for figure in ("after", "curve"):
        of = FIGURES[figure]
        found[figure] = _band([(of(one) or 0.0) - (of(other) or 0.0) for one, other in pairs])
    for figure, of_run in (
        ("seconds_to", partial(to_level, axis="seconds", level=level)),
        ("training_to", partial(training_to, level=level)),
    ):
        times = [(of_run(one), of_run(other)) for one, other in pairs]
        if ratios := [mine / theirs for mine, theirs in times if mine is not None and theirs]:
            found[figure] = _band(ratios)
    return found


def to_level(run: Mapping[str, Any], axis: str, level: float) -> float | None:
    """Return where a run's accuracy first reaches `level`, in samples or seconds; None if it does not, or if the run was stopped and went
    on, so that its seconds lack what that cost."""
    if axis == "seconds" and run.get("resumed"):
        return None
    return reached(run["evaluations"][axis], run["evaluations"]["accuracy"], level)


def training_to(run: Mapping[str, Any], level: float) -> float | None:
    """Return the seconds of as many steps of median length as it takes to `level`: without the start, and without the evaluations, which
    take the same cores. None if the run does not reach it."""
    samples = to_level(run, "samples", level)
    if samples is None or len(run.get("seconds", ())) < 2:
        return None
    return samples / float(run["samples"][0]) * _step_seconds(run)


def _all(values: Sequence[float | None]) -> list[float]:
    there = [value for value in values if value is not None]
    return there if len(there) == len(values) else []


def _band(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in band(values)]
