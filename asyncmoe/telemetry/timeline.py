"""The timeline figure: a lane for the trainer, one for each engine, and one for the overlap of training and generation.

A run is reduced to a fixed number of columns, so the resolution depends on the figure's width, not on the run's duration. Time between two
starts of a run is omitted: the columns of consecutive windows are adjacent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from asyncmoe.telemetry.figures import BLUE, FAINT, GREEN, GREY, INK, PURPLE, RED, Picture, picture, style
from asyncmoe.telemetry.format import percent
from asyncmoe.telemetry.overlap import Cover, Interval, intersection, length, union
from asyncmoe.telemetry.run import RunRecords
from asyncmoe.telemetry.schema import Step, What
from asyncmoe.telemetry.series import rl_step

TRAINER_PARTS: tuple[What, ...] = ("train", "sync", "wait")
BOTH = "both"
"""Name of the lane, and of its part, for time in which the trainer trains while an engine generates."""
MAX_ENGINES = 8
_GRAIN = 1 / 16
"""Shares are rounded to multiples of this; finer differences are invisible in a lane."""
_COLOURS = {"train": BLUE, "sync": RED, "wait": GREY, "generate": GREEN, "pause": PURPLE, BOTH: INK}
_LABELS = {
    "train": "train",
    "sync": "weight sync",
    "wait": "wait for a batch",
    "generate": "generate",
    "pause": "paused",
    BOTH: "train and generate at once",
}
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


def merge_equal(shares: Sequence[float], edges: Sequence[float]) -> tuple[list[float], list[float]]:
    """Merge neighbouring columns of equal share. The drawing is the same, but its file is much smaller."""
    kept = [i for i in range(len(shares)) if i == 0 or shares[i] != shares[i - 1]]
    return [shares[i] for i in kept], [*(edges[i] for i in kept), edges[-1]]


def recent_windows(run: RunRecords, steps: int = 10) -> list[Interval]:
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
    return [round(cover.within(begin, end) / (end - begin) / _GRAIN) * _GRAIN for begin, end in cells]


def recent(run: RunRecords) -> Picture | None:
    """Draw the last steps, with the end of each step and the engines' pauses."""
    lines = timeline(run, recent_windows(run))
    if not run.spans or not lines.edges[-1]:
        return None
    with style():
        figure, axes = _draw(lines, f"Last {len((run.rl or run.steps)[-10:])} steps")
        _step_ends(axes, lines, run, (run.rl or run.steps)[-10:])
        _legend(figure, lines, pauses=_pauses(axes, lines, run))
        return picture(figure)


def whole(run: RunRecords) -> Picture | None:
    """Draw the whole run, warm-up included."""
    lines = timeline(run, run.windows)
    if not run.spans or not lines.edges[-1]:
        return None
    with style():
        figure, axes = _draw(lines, "Whole run")
        _legend(figure, lines)
        if run.rl and run.steps[0].phase == "warmup":
            _mark(axes, lines, lines.position(run.rl[0].begin), "RL begins")
        for begin, _ in run.windows[1:]:
            _mark(axes, lines, lines.position(begin), "resumed")
        return picture(figure)


def _draw(lines: Timeline, title: str) -> tuple[Any, Any]:
    count = len(lines.lanes)
    figure = Figure(figsize=(11, 1.15 + 0.36 * count), layout="constrained")
    axes = figure.add_subplot()
    scale, unit = _scale(lines)
    edges = [edge / scale for edge in lines.edges]
    for row, lane in enumerate(reversed(lines.lanes)):
        _draw_lane(axes, lane, row, edges)
    overlap = "" if lines.overlap is None else f": during {percent(lines.overlap)} of the RL training time an engine generates"
    axes.set_title(title + overlap, pad=24)
    axes.set_yticks([row + 0.4 for row in range(count)], [_lane_name(lane) for lane in reversed(lines.lanes)])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(-0.1, count + 0.05)
    axes.set_xlabel(unit if not lines.engines_left_out else f"{unit}; {lines.engines_left_out} more engines are not drawn")
    return figure, axes


def _legend(figure: Any, lines: Timeline, pauses: bool = False) -> None:
    present = [part for part in _COLOURS if any(any(lane.parts.get(part, ())) for lane in lines.lanes) or (part == "pause" and pauses)]
    handles = [Patch(color=_COLOURS[part], label=_LABELS[part]) for part in present]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def _draw_lane(axes: Any, lane: TimelineLane, row: int, edges: list[float]) -> None:
    axes.fill_between([edges[0], edges[-1]], row, row + 0.8, color=FAINT, linewidth=0)
    # Each part is drawn up to the sum of itself and the preceding parts; the preceding parts are drawn later, on top of it.
    heights = [[0.8 * sum(column) for column in zip(*list(lane.parts.values())[: n + 1], strict=True)] for n in range(len(lane.parts))]
    for part, height in reversed(list(zip(lane.parts, heights, strict=True))):
        tops, merged = merge_equal(height, edges)
        axes.stairs([row + top for top in tops], merged, baseline=row, fill=True, color=_COLOURS[part], linewidth=0)


def _step_ends(axes: Any, lines: Timeline, run: RunRecords, steps: list[Step]) -> None:
    scale, _ = _scale(lines)
    top = len(lines.lanes)
    for step in steps:
        x = lines.position(step.time) / scale
        axes.vlines(x, 0, top, color=INK, linewidth=0.6, linestyle=(0, (2, 2)), zorder=2.5)
        begin = lines.position(step.begin) / scale
        label = _step_label(run, step, share=(x - begin) * scale / lines.edges[-1])
        axes.annotate(label, ((begin + x) / 2, top), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=7)


def _step_label(run: RunRecords, step: Step, share: float) -> str:
    """Return the longest label that fits into `share` of the figure's width."""
    name, count = ("step", rl_step(run, step)) if step.phase == "rl" else ("warm-up", step.step)
    return f"{name} {count}" if share > 0.075 else str(count) if share > 0.035 else ""


def _pauses(axes: Any, lines: Timeline, run: RunRecords) -> bool:
    scale, _ = _scale(lines)
    names = [lane.name for lane in reversed(lines.lanes)]
    begin, end = lines.windows[0][0], lines.windows[-1][1]
    spans = [span for span in run.spans if span.what == "pause" and begin <= span.begin <= end]
    for span in spans[:_MOST_PAUSES]:
        name = span.who.replace(".", " ")
        if name in names:
            row = names.index(name)
            width = max((lines.position(span.end) - lines.position(span.begin)) / scale, lines.edges[-1] / scale / 700)
            axes.broken_barh([(lines.position(span.begin) / scale, width)], (row, 0.8), color=_COLOURS["pause"], linewidth=0, zorder=3)
    return bool(spans)


def _mark(axes: Any, lines: Timeline, seconds: float, text: str) -> None:
    x = seconds / _scale(lines)[0]
    axes.vlines(x, 0, len(lines.lanes), color=INK, linewidth=0.9)
    axes.annotate(text, (x, len(lines.lanes)), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=7)


def _scale(lines: Timeline) -> tuple[float, str]:
    return (60.0, "minutes") if lines.edges[-1] > _MINUTES_FROM else (1.0, "seconds")


def _lane_name(lane: TimelineLane) -> str:
    return "both at once" if lane.name == BOTH else lane.name
