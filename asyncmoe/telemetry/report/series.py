"""The points of the page's curves and heat maps."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from asyncmoe.telemetry import distribution
from asyncmoe.telemetry.metric import Metric, numbers
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout
from asyncmoe.telemetry.run import RunRecords
from asyncmoe.telemetry.schema import Step

MOST_POINTS = 500
Drawn = Step | Rollout | Evaluation
Row = tuple[float | None, ...]
"""x, and values there; None: not measured."""
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True)
class RecordedSeries:
    """A metric of a run: the (x, y) of each curve, by the key of a mapping, or "" for a plain number. Shares are in per cent."""

    metric: Metric
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    @property
    def ordered(self) -> list[tuple[str, list[tuple[float, float]]]]:
        """The curves: numbers by value, before any text."""
        return sorted(self.curves.items(), key=lambda one: (float(one[0]) if _NUMBER.fullmatch(one[0]) else math.inf, one[0]))


def rl_step(run: RunRecords, step: Step) -> int:
    """Return the step's number since the start of reinforcement learning; the first step is 1."""
    return step.step - run.rl[0].step + 1


def placed(run: RunRecords, kind: type[Drawn]) -> Sequence[tuple[float, Drawn]]:
    """Return the records of a kind with their place on the x axis: for steps the RL step, for evaluations the RL step evaluated, for
    rollout records the minutes of RL time since the first RL step began."""
    if kind is Step:
        return [(rl_step(run, step), step) for step in run.rl]
    if kind is Evaluation:
        first = run.rl[0].step if run.rl else 1
        return [(record.version - first + 1, record) for record in run.evaluations]
    points: list[tuple[float, Drawn]] = []
    before = 0.0
    for begin, end in run.rl_windows:
        points += [((before + record.time - begin) / 60, record) for record in run.rollout if begin <= record.time <= end]
        before += end - begin
    return points


def recorded(run: RunRecords, kind: type[Drawn]) -> dict[str, RecordedSeries]:
    """Return every metric that records of a kind have, by name (`metric.numbers`). Evaluations have the curves of each set."""
    found: dict[str, RecordedSeries] = {}
    for x, record in placed(run, kind):
        of_set = record.name if isinstance(record, Evaluation) else ""
        for one in numbers(record):
            curve = " ".join(part for part in (of_set, one.key) if part)
            points = found.setdefault(one.name, RecordedSeries(one.metric)).curves.setdefault(curve, [])
            points.append((x, 100 * one.value if one.metric.is_share else one.value))
    return found


def grid(run: RunRecords, kind: type[Drawn], name: str, metric: Metric) -> tuple[list[float], list[Row]]:
    """Return the keys and the columns of a mapping's heat map. A column has its x, and the value of each key or, as `Plot.heat` says, its
    share in the total there, in per cent; the keys of shares are on one grid."""
    shares = metric.plot is not None and metric.plot.heat == "share"
    known = [(x, value) for x, record in placed(run, kind) if (value := getattr(record, name))]
    each = [value for _, value in known]
    mappings: Sequence[Mapping[float, float]] = [_shares(value) for value in distribution.aligned(each)] if shares else each
    keys = sorted({key for value in mappings for key in value})
    scale = 100 if shares or metric.is_share else 1
    cells = [[value.get(key, 0.0 if shares else None) for key in keys] for value in mappings]
    return keys, thinned([(x, *(None if one is None else scale * one for one in row)) for (x, _), row in zip(known, cells, strict=True)])


def thinned(rows: Sequence[Row]) -> list[Row]:
    """Average neighbours, each place of a row by itself, if there are more than `MOST_POINTS`."""
    size = -(-len(rows) // MOST_POINTS) or 1
    return [tuple(map(_mean, zip(*rows[i : i + size], strict=True))) for i in range(0, len(rows), size)]


def running_mean(values: Sequence[float]) -> list[float]:
    """Return the mean over a window of about a twentieth of the values, which shrinks at both ends."""
    reach, last = max(len(values) // 40, 2), len(values) - 1
    sides = [min(reach, i, last - i) for i in range(len(values))]
    return [fmean(values[i - side : i + side + 1]) for i, side in enumerate(sides)]


def _shares(counts: Mapping[float, float]) -> dict[float, float]:
    whole = sum(counts.values())
    return {key: count / whole for key, count in counts.items()} if whole else {}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
