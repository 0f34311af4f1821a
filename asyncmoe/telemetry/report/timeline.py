"""The timelines: when the trainer trained, each engine generated, and both at once, as heat maps.

A run is reduced to a fixed number of columns, so the size depends on their number, not on the run's duration. Time between two starts of a
run is omitted: the columns of consecutive windows are adjacent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from asyncmoe.telemetry.format import percent
from asyncmoe.telemetry.overlap import Interval, covered, intersection, length, union
from asyncmoe.telemetry.report.figures import Figure, PageSection, heat_map
from asyncmoe.telemetry.report.series import rl_step
from asyncmoe.telemetry.run import RunRecords

MAX_ENGINES = 8
RECENT = 10
"""Steps of the first timeline."""
COLUMNS = 1000
_MINUTES_FROM = 300.0
_NOTE = "How much of each moment: a run that overlaps keeps its engines generating while the trainer trains."


def section(runs: Mapping[str, RunRecords]) -> PageSection:
    """Return the timelines of the last steps and of the whole run, warm-up included; none of a run without spans or steps."""
    found = [figure for name, run in runs.items() for figure in _figures(name if len(runs) > 1 else "", run)]
    return PageSection("Timeline", _NOTE, found, wide=True)


def lanes(run: RunRecords, windows: Sequence[Interval], columns: int = COLUMNS) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the edges of the columns (float64[N + 1]), in seconds since the start without omitted time, and the share (float64[N], 0 to 1)
    of each column in which each of the first `MAX_ENGINES` engines, the trainer, and both did something."""
    windows, whole = union(windows), length(windows)
    counts = [max(round(columns * (end - begin) / whole), 1) for begin, end in windows]
    sides = [np.linspace(begin, end, count + 1) for (begin, end), count in zip(windows, counts, strict=True)]
    begins = np.concatenate([[], *(side[:-1] for side in sides)])
    ends = np.concatenate([[], *(side[1:] for side in sides)])
    train, generate = run.intervals("train", "trainer.0"), run.intervals("generate")
    done = {
        "trainer trains": train,
        "trainer sends weights": run.intervals("sync", "trainer.0"),
        "trainer waits for a batch": run.intervals("wait", "trainer.0"),
        **{name.replace(".", " "): run.intervals("generate", name) for name in run.engines[:MAX_ENGINES]},
        "an engine is paused": run.intervals("pause"),
        "both at once": intersection(train, generate),
    }
    edges = np.concatenate([[0.0], np.cumsum(ends - begins)])
    shares = {name: (covered(intervals, ends) - covered(intervals, begins)) / (ends - begins) for name, intervals in done.items()}
    return edges, shares


def _figures(name: str, run: RunRecords) -> Iterator[Figure]:
    if not run.spans or not run.steps:
        return
    steps = (run.rl or run.steps)[-RECENT:]
    ends = {step.time: f"step {rl_step(run, step)}" if step.phase == "rl" else f"warm-up {step.step}" for step in steps}
    yield from _figure(name, f"Last {len(steps)} steps", run, intersection(run.windows, [(steps[0].begin, steps[-1].time)]), ends)
    marks = {begin: "resumed" for begin, _ in run.windows[1:]}
    if run.rl and run.steps[0].phase == "warmup":
        marks[run.rl[0].begin] = "RL begins"
    yield from _figure(name, "Whole run", run, run.windows, marks)


def _figure(name: str, title: str, run: RunRecords, windows: Sequence[Interval], marks: Mapping[float, str]) -> Iterator[Figure]:
    """Yield a timeline with a line and a text at each time of `marks`; nothing if no time has passed."""
    edges, parts = lanes(run, windows)
    if not edges[-1]:
        return
    scale, unit = (60.0, "minutes") if edges[-1] > _MINUTES_FROM else (1.0, "seconds")
    middles = np.round((edges[:-1] + edges[1:]) / 2 / scale, 4).tolist()
    train = intersection(intersection(run.intervals("train", "trainer.0"), run.rl_windows), windows)
    overlap = length(intersection(train, run.intervals("generate"))) / length(train) if train else None
    title += "" if overlap is None else f": during {percent(overlap)} of the RL training time an engine generates"
    title += f"; {len(run.engines) - MAX_ENGINES} more engines are not drawn" if len(run.engines) > MAX_ENGINES else ""
    z = [np.round(100 * shares, 1).tolist() for shares in parts.values()]
    figure = heat_map(f"{name} · {title}" if name else title, _NOTE, (unit, "", "share of the time, %"), middles, list(parts), z)
    places = [(sum(min(max(at, begin), end) - begin for begin, end in windows) / scale, text) for at, text in marks.items()]
    lines = [{"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 1, "dash": "dot"}} for x, _ in places]
    words = [{"x": x, "y": 1, "yref": "paper", "yanchor": "bottom", "text": text, "showarrow": False} for x, text in places]
    layout = {**figure.layout, "height": 120 + 26 * len(parts), "shapes": lines, "annotations": words}
    layout["yaxis"] = {**figure.layout["yaxis"], "autorange": "reversed"}
    yield replace(figure, layout=layout)
