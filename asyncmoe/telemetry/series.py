"""The data of the report's curves and bars."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from asyncmoe.telemetry.metric import Metric
from asyncmoe.telemetry.overlap import Cover
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout
from asyncmoe.telemetry.run import RunRecords
from asyncmoe.telemetry.schema import Step

MOST_POINTS = 500
Drawn = Step | Rollout | Evaluation
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True)
class Series:
    """A curve: ascending x, and y of the same length."""

    x: Sequence[float]
    y: Sequence[float]

    @classmethod
    def of(cls, points: Sequence[tuple[float, float | None]]) -> Series:
        """Build a series. Omits points without a value; averages neighbours if there are more than `MOST_POINTS` points."""
        known = [(x, y) for x, y in points if y is not None]
        size = -(-len(known) // MOST_POINTS) or 1
        chunks = [known[i : i + size] for i in range(0, len(known), size)]
        return cls([fmean(x for x, _ in chunk) for chunk in chunks], [fmean(y for _, y in chunk) for chunk in chunks])

    def smooth(self) -> Series:
        """Return the running mean over about a twentieth of the curve. The window shrinks symmetrically at the ends."""
        reach = max(len(self.y) // 40, 2)
        sides = [min(reach, i, len(self.y) - 1 - i) for i in range(len(self.y))]
        return Series(self.x, [fmean(self.y[i - side : i + side + 1]) for i, side in enumerate(sides)])


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


def curves(run: RunRecords, kind: type[Drawn], name: str, metric: Metric) -> list[tuple[str, Series]]:
    """Return the curve of a metric; for a mapping, each key and its curve; for evaluations, each set and its curve, if sets have names.

    Shares are in per cent; a missing key of shares is 0.
    """
    if kind is Evaluation and not metric.key:
        return _of_sets(run, name, metric)
    values = [(x, getattr(record, name)) for x, record in placed(run, kind)]
    if not metric.key:
        return [("", Series.of([(x, _scaled(value, metric)) for x, value in values]))]
    absent = 0.0 if metric.is_share else None
    known = [(x, value) for x, value in values if value is not None]
    keys = sorted({key for _, value in known for key in value}, key=_order)
    return [(str(key), Series.of([(x, _scaled(value.get(key, absent), metric)) for x, value in known])) for key in keys]


def _of_sets(run: RunRecords, name: str, metric: Metric) -> list[tuple[str, Series]]:
    points: dict[str, list[tuple[float, float | None]]] = {}
    for x, record in placed(run, Evaluation):
        assert isinstance(record, Evaluation)
        points.setdefault(record.name, []).append((x, _scaled(getattr(record, name), metric)))
    return [(set_name, Series.of(points[set_name])) for set_name in sorted(points)] or [("", Series.of([]))]


def bars(run: RunRecords, kind: type[Drawn], name: str, metric: Metric) -> dict[int, float]:
    """Return the height of each bar of a mapping from whole numbers, as `Plot.bars` says; shares are in per cent."""
    found: dict[int, list[float]] = {}
    for _, record in placed(run, kind):
        for key, value in (getattr(record, name) or {}).items():
            found.setdefault(key, []).append(value)
    if metric.plot is not None and metric.plot.bars == "share":
        whole = sum(map(sum, found.values()))
        return {key: 100 * sum(found[key]) / whole for key in sorted(found)} if whole else {}
    return {key: _scaled(fmean(found[key]), metric) or 0.0 for key in sorted(found)}


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
