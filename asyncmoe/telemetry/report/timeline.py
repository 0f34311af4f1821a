"""The timelines: a lane for the trainer, one for each engine, and one for the overlap of training and generation.

A run is reduced to a fixed number of columns, so the size depends on their number, not on the run's duration. Time between two starts of a
run is omitted: the columns of consecutive windows are adjacent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from asyncmoe.telemetry.format import percent
from asyncmoe.telemetry.overlap import Cover, Interval, intersection, length, union
from asyncmoe.telemetry.report.series import rl_step
from asyncmoe.telemetry.run import RunRecords
from asyncmoe.telemetry.schema import Step, What

TRAINER_PARTS: tuple[What, ...] = ("train", "sync", "wait")
BOTH = "both"
"""Name of the lane, and of its part, for time in which the trainer trains while an engine generates."""
MAX_ENGINES = 8
RECENT = 10
"""Steps of the first timeline."""
_GRAIN = 16
"""Shares are rounded to multiples of 1/16; finer differences are invisible in a lane."""
_MINUTES_FROM = 300.0
_MOST_PAUSES = 400


@dataclass(frozen=True)
class TimelineLane:
    """One lane. `parts`: for each part, its share (0 to 1) of each column."""

    name: str
    parts: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Timeline:
    """The data of a timeline figure. `edges` are seconds since the start without omitted time, one more than there are columns."""

    windows: Sequence[Interval]
    edges: Sequence[float]
    lanes: Sequence[TimelineLane]
    overlap: float | None
    """Share of the RL training time, within the windows, in which at least one engine was generating."""
    engines_left_out: int

    def position(self, time: float) -> float:
        """Convert a Unix time to seconds since the start without omitted time."""
        return sum(min(max(time, begin), end) - begin for begin, end in self.windows)


def timeline(run: RunRecords, windows: Sequence[Interval], columns: int = 1000) -> Timeline:
    """Build the trainer's lane, a lane for each of the first `MAX_ENGINES` engines, and the lane of their overlap."""
    windows = union(windows)
    cells = _cells(windows, columns)
    generate = run.intervals("generate")
    train = intersection(run.intervals("train", "trainer.0"), windows)
    both = intersection(train, generate)
    trainer = TimelineLane("trainer", {what: _shares(run.intervals(what, "trainer.0"), cells) for what in TRAINER_PARTS})
    engines = [
        TimelineLane(name.replace(".", " "), {"generate": _shares(run.intervals("generate", name), cells)})
        for name in run.engines[:MAX_ENGINES]
    ]
    edges = [0.0]
    for begin, end in cells:
        edges.append(edges[-1] + end - begin)
    rl_train = length(intersection(train, run.rl_windows))
    overlap = length(intersection(both, run.rl_windows)) / rl_train if rl_train > 0 else None
    lanes = [trainer, *engines, TimelineLane(BOTH, {BOTH: _shares(both, cells)})]
    return Timeline(windows, edges, lanes, overlap, max(len(run.engines) - MAX_ENGINES, 0))


def recent_windows(run: RunRecords, steps: int = RECENT) -> list[Interval]:
    """Return the time of the last `steps` steps: RL steps if there are any, else warm-up steps."""
    last = (run.rl or run.steps)[-steps:]
    return intersection(run.windows, [(last[0].begin, last[-1].time)])


def _cells(windows: Sequence[Interval], columns: int) -> list[Interval]:
    whole = length(windows)
    cells: list[Interval] = []
    for begin, end in windows:
        count = max(round(columns * (end - begin) / whole), 1)
        cells += [(begin + (end - begin) * i / count, begin + (end - begin) * (i + 1) / count) for i in range(count)]
    return cells


def _shares(intervals: Sequence[Interval], cells: Sequence[Interval]) -> list[float]:
    cover = Cover.of(intervals)
    return [round(cover.within(begin, end) / (end - begin) * _GRAIN) / _GRAIN for begin, end in cells]


@dataclass(frozen=True)
class DrawnLane:
    """A lane as it is drawn. `parts`: for each part, its share of each column in sixteenths."""

    name: str
    parts: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Mark:
    """A line across all lanes at `x`, with a text above it; for the end of a step, the text is between `begin` and `x`."""

    x: float
    text: str
    begin: float | None = None


@dataclass(frozen=True)
class TimelineFigure:
    """A timeline as it is drawn; all places are in `unit`.

    Attributes:
        middles: middle of each column.
        pauses: (number of the lane, begin, end) of the engines' pauses.
        more: engines without a lane.
    """

    title: str
    unit: str
    middles: Sequence[float]
    end: float
    lanes: Sequence[DrawnLane]
    marks: Sequence[Mark]
    pauses: Sequence[tuple[int, float, float]]
    more: int


def timelines(run: RunRecords) -> list[TimelineFigure]:
    """Return the timelines of the last steps, with the end of each step and the engines' pauses, and of the whole run, warm-up included;
    none without spans or steps."""
    if not run.spans or not run.steps:
        return []
    steps = (run.rl or run.steps)[-RECENT:]
    recent, whole = timeline(run, recent_windows(run)), timeline(run, run.windows)
    found = []
    if recent.edges[-1]:
        scale, _ = _scale(recent)
        ends = [Mark(recent.position(step.time) / scale, _step_name(run, step), recent.position(step.begin) / scale) for step in steps]
        found.append(_figure(recent, f"Last {len(steps)} steps", ends, _pauses(recent, run)))
    if whole.edges[-1]:
        scale, _ = _scale(whole)
        marks = [Mark(whole.position(begin) / scale, "resumed") for begin, _ in run.windows[1:]]
        if run.rl and run.steps[0].phase == "warmup":
            marks.insert(0, Mark(whole.position(run.rl[0].begin) / scale, "RL begins"))
        found.append(_figure(whole, "Whole run", marks, []))
    return found


def _figure(lines: Timeline, title: str, marks: Sequence[Mark], pauses: Sequence[tuple[int, float, float]]) -> TimelineFigure:
    scale, unit = _scale(lines)
    overlap = "" if lines.overlap is None else f": during {percent(lines.overlap)} of the RL training time an engine generates"
    middles = [round((begin + end) / 2 / scale, 4) for begin, end in pairwise(lines.edges)]
    lanes = [
        DrawnLane(
            "both at once" if lane.name == BOTH else lane.name, {part: [round(_GRAIN * s) for s in lane.parts[part]] for part in lane.parts}
        )
        for lane in lines.lanes
    ]
    return TimelineFigure(title + overlap, unit, middles, round(lines.edges[-1] / scale, 4), lanes, marks, pauses, lines.engines_left_out)


def _step_name(run: RunRecords, step: Step) -> str:
    return f"step {rl_step(run, step)}" if step.phase == "rl" else f"warm-up {step.step}"


def _pauses(lines: Timeline, run: RunRecords) -> list[tuple[int, float, float]]:
    scale, _ = _scale(lines)
    lane_of = {lane.name: i for i, lane in enumerate(lines.lanes)}
    begin, end = lines.windows[0][0], lines.windows[-1][1]
    spans = [span for span in run.spans if span.what == "pause" and begin <= span.begin <= end and span.who.replace(".", " ") in lane_of]
    return [
        (lane_of[span.who.replace(".", " ")], round(lines.position(span.begin) / scale, 4), round(lines.position(span.end) / scale, 4))
        for span in spans[-_MOST_PAUSES:]
    ]


def _scale(lines: Timeline) -> tuple[float, str]:
    return (60.0, "minutes") if lines.edges[-1] > _MINUTES_FROM else (1.0, "seconds")
