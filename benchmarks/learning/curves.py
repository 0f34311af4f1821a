"""What is kept of a run, and what several seeds of an arm say together. Pure, but for `of_run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from asyncmoe.telemetry.run import RunRecords, load

Point = tuple[float, float, float]
"""Place on the axis, mean, half of the mean's 95 % interval."""
_DIGITS, _PLACES = 5, 24
_OF_STEPS = (
    "reward_mean", "entropy", "grad_norm", "clip_fraction", "train_infer_kl", "ess", "staleness_mean", "train_seconds", "wait_seconds",
    "sync_seconds", "response_tokens_mean",
)  # fmt: skip
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Factor of a 95 % interval of a mean by the number of seeds: quantiles of Student's t with one degree of freedom less."""


def of_run(run_dir: Path, batch: int) -> dict[str, Any]:
    """Return a run's curves; see `curves`. Raises DataError."""
    return curves(load(run_dir), batch)


def curves(run: RunRecords, batch: int) -> dict[str, Any]:
    """Return the figures of each RL step as lists of equal length, and the evaluations.

    Args:
        batch: samples of a step.

    Returns:
        {"samples", "seconds", one list for each figure, "routing_mismatch": mean over layers, "tokens_per_s",
        "evaluations": {"samples", "seconds", "accuracy", "stderr"}}; seconds of RL time, without pauses between two starts of the run.
    """
    rl = run.rl
    first = rl[0].step - 1
    ends = [_elapsed(run, step.time) for step in rl]
    found: dict[str, Any] = {"samples": [(step.step - first) * batch for step in rl], "seconds": [round(end, 1) for end in ends]}
    found |= {name: [_short(getattr(step, name)) for step in rl] for name in _OF_STEPS}
    found["routing_mismatch"] = [_short(fmean(step.routing_mismatch.values())) if step.routing_mismatch else None for step in rl]
    tokens = sum(sum((step.ages or {}).values()) for step in rl)
    versions = {step.version: (step.step - first) * batch for step in rl}
    kept = [one for one in run.evaluations if one.reward_mean is not None]
    return {
        **found,
        "tokens_per_s": round(tokens / ends[-1], 1),
        "evaluations": {
            "samples": [versions.get(one.version, 0) for one in kept],
            "seconds": [round(_elapsed(run, one.time), 1) for one in kept],
            "accuracy": [_short(one.reward_mean) for one in kept],
            "stderr": [_short(one.reward_stderr) for one in kept],
        },
    }


def reached(samples: Sequence[float], accuracy: Sequence[float], level: float) -> float | None:
    """Return where a curve first reaches `level`, linearly between its points; None if it does not."""
    for at, value in enumerate(accuracy):
        if value >= level:
            if at == 0:
                return samples[0]
            share = (level - accuracy[at - 1]) / (value - accuracy[at - 1])
            return samples[at - 1] + share * (samples[at] - samples[at - 1])
    return None


def band(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval (Student's t); 0 for one value."""
    if len(values) < 2:
        return values[0], 0.0
    return fmean(values), T_95[len(values)] * stdev(values) / len(values) ** 0.5


def together(runs: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    """Return a figure of an arm's runs by samples, where all of them have it."""
    by_samples: dict[float, list[float]] = {}
    for run in runs:
        for at, value in _values(run, name, "samples"):
            by_samples.setdefault(at, []).append(value)
    return [(at, *band(values)) for at, values in sorted(by_samples.items()) if len(values) == len(runs)]


def against_seconds(runs: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    """Return a figure of an arm's runs by seconds, linear between its points, from where all have one until the first has no more."""
    lines = [np.array(_values(run, name, "seconds")) for run in runs]
    if any(len(line) < 2 for line in lines):
        return []
    first, last = max(line[0, 0] for line in lines), min(line[-1, 0] for line in lines)
    places = np.linspace(first, last, _PLACES)
    return [(float(at), *band([float(np.interp(at, *line.T)) for line in lines])) for at in places]


def _values(run: Mapping[str, Any], name: str, axis: str) -> list[tuple[float, float]]:
    of = run["evaluations"] if name == "accuracy" else run
    told = zip(of[axis], of.get(name, ()), strict=False)  # TRL does not say all that we do
    return [(at, value) for at, value in told if value is not None]


def _elapsed(run: RunRecords, time: float) -> float:
    return sum(max(0.0, min(end, time) - begin) for begin, end in run.rl_windows)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")
