"""The data of the page's curves, bars and heat maps."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from statistics import fmean
from typing import Any

from asyncmoe.telemetry import distribution
from asyncmoe.telemetry.metric import Metric
from asyncmoe.telemetry.overlap import Cover
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout
from asyncmoe.telemetry.run import RunRecords
from asyncmoe.telemetry.schema import Step

MOST_POINTS = 500
MOST_ROWS = 96
"""Rows of a heat map; neighbouring keys share a row if there are more keys."""
Drawn = Step | Rollout | Evaluation
Point = tuple[float, float, float | None]
"""x, y and the standard error of y."""
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_JAGGED_FROM = 16
_JAGGED_SHARE = 0.4


@dataclass(frozen=True)
class Series:
    """A curve: ascending x, and y of the same length; errors: the standard error of each y, or nothing."""

    x: Sequence[float]
    y: Sequence[float]
    errors: Sequence[float | None] = ()

    @classmethod
    def of(cls, points: Sequence[tuple[float, float | None]], errors: Sequence[float | None] = ()) -> Series:
        """Build a series. Omits points without a value; averages neighbours, and their errors, if there are more than `MOST_POINTS`."""
        each = zip_longest(points, errors)
        known = [(x, y, error) for (x, y), error in each if y is not None and math.isfinite(y)]
        chunks = _chunks(known, MOST_POINTS)
        found = cls([fmean(x for x, _, _ in chunk) for chunk in chunks], [fmean(y for _, y, _ in chunk) for chunk in chunks])
        return replace(found, errors=[_mean([error for _, _, error in chunk]) for chunk in chunks]) if errors else found

    @property
    def jagged(self) -> bool:
        """Whether the curve is long, and turns so often that only its running mean shows where it goes."""
        rises = [after - before for before, after in pairwise(self.y) if after != before]
        turns = sum((before > 0) != (after > 0) for before, after in pairwise(rises))
        return len(self.y) >= _JAGGED_FROM and turns > _JAGGED_SHARE * len(self.y)


@dataclass(frozen=True)
class HeatMap:
    """A heat map: a value for each row (a key, or the first key of several) and each column (ascending x); None: not measured."""

    x: Sequence[float]
    keys: Sequence[float]
    values: Sequence[Sequence[float | None]]


def _chunks(points: list[Point], most: int) -> list[list[Point]]:
    size = -(-len(points) // most) or 1
    return [points[i : i + size] for i in range(0, len(points), size)]


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


Value = float | Mapping[str | int, float | None] | None
Values = Sequence[tuple[float, Value]]
"""Places on the x axis, and the values of a field there."""


def curves(run: RunRecords, kind: type[Drawn], name: str, metric: Metric) -> list[tuple[str, Series]]:
    """Return the curves of a metric with their names: one without a name, or one for each key of a mapping; for evaluations, those of each
    set.

    Shares are in per cent; a missing key of shares is 0.
    """
    sets: dict[str, list[tuple[float, Drawn]]] = {}
    for x, record in placed(run, kind):
        sets.setdefault(record.name if isinstance(record, Evaluation) else "", []).append((x, record))
    found: list[tuple[str, Series]] = []
    for set_name in sorted(sets):
        values = [(x, getattr(record, name)) for x, record in sets[set_name]]
        error = "" if metric.plot is None else metric.plot.error
        errors = [getattr(record, error) for _, record in sets[set_name]] if error else []
        found += [(" ".join(part for part in (set_name, key) if part), points) for key, points in curves_of(values, metric, errors)]
    return found


def curves_of(values: Values, metric: Metric, errors: Sequence[Value] = ()) -> list[tuple[str, Series]]:
    """Return the curves of the values of a field and their standard errors, as `curves`. An old record has a number where a newer one has a
    mapping."""
    each = list(zip_longest(values, errors))
    if not metric.key:
        plain = [(x, value, error) for (x, value), error in each if not isinstance(value, Mapping)]
        of_plain = [_scaled(error, metric) for _, _, error in plain if not isinstance(error, Mapping)] if errors else []
        return [("", Series.of([(x, _scaled(value, metric)) for x, value, _ in plain], of_plain))]
    absent = 0.0 if metric.is_share else None
    known = [(x, _mapping(value), _mapping(error)) for (x, value), error in each if value is not None]
    keys = sorted({key for _, value, _ in known for key in value}, key=_order)
    found = []
    for key in keys:
        of_key = [_scaled(error.get(key), metric) for _, _, error in known] if errors else []
        found.append((str(key), Series.of([(x, _scaled(value.get(key, absent), metric)) for x, value, _ in known], of_key)))
    return found


def _mapping(value: Value) -> Mapping[Any, float | None]:
    return value if isinstance(value, Mapping) else {"": value}


def parts(run: RunRecords, name: str, part: str, metric: Metric) -> list[tuple[str, Series]]:
    """Return the curves of a field of the records that a rollout record's field maps names to; counts by reason are summed."""
    found: dict[str, list[tuple[float, float | None]]] = {}
    for x, record in placed(run, Rollout):
        for key, inner in getattr(record, name).items():
            value = getattr(inner, part)
            whole = sum(value.values()) if isinstance(value, Mapping) else value
            found.setdefault(str(key), []).append((x, _scaled(whole, metric)))
    return [(key, Series.of(found[key])) for key in sorted(found, key=_order)]


def bars(run: RunRecords, kind: type[Drawn], name: str, metric: Metric) -> dict[float, float]:
    """Return the height of each bar of a mapping from numbers, as `Plot.bars` says; shares are in per cent."""
    found: dict[float, list[float]] = {}
    for _, values in _numbered(run, kind, name):
        for key, value in values.items():
            found.setdefault(key, []).append(value)
    if metric.plot is not None and metric.plot.bars == "share":
        whole = sum(map(sum, found.values()))
        return {key: 100 * sum(found[key]) / whole for key in sorted(found)} if whole else {}
    return {key: _scaled(fmean(found[key]), metric) or 0.0 for key in sorted(found)}


def grid(run: RunRecords, kind: type[Drawn], name: str, metric: Metric) -> HeatMap:
    """Return the heat map of a mapping from numbers: its values over the steps, or their shares of a step's total, in per cent.

    Of more than `MOST_POINTS` steps, neighbours are averaged; of more than `MOST_ROWS` keys, neighbours are added (shares) or averaged.
    """
    share = metric.plot is not None and metric.plot.bars == "share"
    known = _numbered(run, kind, name)
    if share:
        known = [(x, _shares(value)) for x, value in known if sum(value.values()) > 0]
    if not known:
        return HeatMap([], [], [])
    rows = _rows({key for _, value in known for key in value})
    columns = [(x, [_cell(value, row, share, metric) for row in rows]) for x, value in known]
    size = -(-len(columns) // MOST_POINTS)
    chunks = [columns[i : i + size] for i in range(0, len(columns), size)]
    values = [[_mean([cells[row] for _, cells in chunk]) for chunk in chunks] for row in range(len(rows))]
    return HeatMap([fmean(x for x, _ in chunk) for chunk in chunks], [row[0] for row in rows], values)


def _numbered(run: RunRecords, kind: type[Drawn], name: str) -> list[tuple[float, Mapping[float, float]]]:
    """Return the mappings from numbers that a field has, with their places on the x axis; numbers that are not whole on one grid."""
    known = [(x, value) for x, record in placed(run, kind) if (value := getattr(record, name))]
    if all(isinstance(key, int) for _, value in known for key in value):
        return known
    return list(zip([x for x, _ in known], distribution.aligned(value for _, value in known), strict=True))


def _shares(counts: Mapping[float, float]) -> dict[float, float]:
    whole = sum(counts.values())
    return {key: 100 * count / whole for key, count in counts.items()}


def _rows(keys: set[float]) -> list[Sequence[float]]:
    """Return the keys of each row of a heat map: whole numbers without a gap, or those there are."""
    whole = [key for key in keys if isinstance(key, int)]
    if len(whole) < len(keys):
        return [(key,) for key in sorted(keys)]
    first, last = min(whole), max(whole)
    height = -(-(last - first + 1) // MOST_ROWS)
    return [range(key, key + height) for key in range(first, last + 1, height)]


def _cell(value: Mapping[float, float], keys: Sequence[float], share: bool, metric: Metric) -> float | None:
    if share:
        return sum(value.get(key, 0.0) for key in keys)
    return _scaled(_mean([value.get(key) for key in keys]), metric)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def warmup_loss(run: RunRecords) -> Series:
    """Loss of the warm-up over its steps."""
    return Series.of([(step.step, step.loss) for step in run.steps if step.phase == "warmup"])


def trainer_idle(run: RunRecords) -> Series:
    """Percentage of each RL step in which the trainer waited for a batch."""

    def idle(step: Step) -> float | None:
        return 100 * step.wait_seconds / step.step_seconds if step.step_seconds and step.wait_seconds is not None else None

    return Series.of([(rl_step(run, step), idle(step)) for step in run.rl])


def engine_idle(run: RunRecords) -> Series:
    """Percentage of each RL step in which an engine generated nothing, mean over engines."""
    covers = [Cover.of(run.intervals("generate", engine)) for engine in run.engines]

    def idle(step: Step) -> float | None:
        if not covers or step.time <= step.begin:
            return None
        return 100 * (1 - fmean(cover.within(step.begin, step.time) for cover in covers) / (step.time - step.begin))

    return Series.of([(rl_step(run, step), idle(step)) for step in run.rl])


def _scaled(value: float | None, metric: Metric) -> float | None:
    return 100 * value if value is not None and metric.is_share else value


def _order(key: str | int) -> tuple[float, str]:
    """Sort numbers by value, before any text."""
    text = str(key)
    return (float(text), text) if _NUMBER.fullmatch(text) else (math.inf, text)
