"""The timeline figure: a lane for the trainer, one for each engine, and one for the overlap of training and generation."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from asyncmoe.telemetry.figures import BLUE, FAINT, GREEN, GREY, INK, PURPLE, RED, style, svg
from asyncmoe.telemetry.format import percent
from asyncmoe.telemetry.run import RunRecords
from asyncmoe.telemetry.schema import Step
from asyncmoe.telemetry.series import rl_step
from asyncmoe.telemetry.timeline import BOTH, Timeline, TimelineLane, merge_equal, recent_windows, timeline

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


def recent(run: RunRecords) -> str | None:
    """Draw the last steps, with the end of each step and the engines' pauses."""
    lines = timeline(run, recent_windows(run))
    if not run.spans or not lines.edges[-1]:
        return None
    with style():
        figure, axes = _draw(lines, f"Last {len((run.rl or run.steps)[-10:])} steps")
        _step_ends(axes, lines, run, (run.rl or run.steps)[-10:])
        _legend(figure, lines, pauses=_pauses(axes, lines, run))
        return svg(figure)


def whole(run: RunRecords) -> str | None:
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
        return svg(figure)


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
