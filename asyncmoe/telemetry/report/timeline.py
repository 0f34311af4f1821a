"""The timeline of the last steps: when the trainer trained, waited and sent weights, and when each engine generated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from asyncmoe.telemetry.format import percent
from asyncmoe.telemetry.overlap import intersection
from asyncmoe.telemetry.report.figures import Figure, PageSection, axis, layout, rl_step
from asyncmoe.telemetry.run import RunRecords
from asyncmoe.telemetry.schema import What
from asyncmoe.telemetry.summary import overlap_share

MAX_ENGINES = 8
RECENT = 10
"""Number of steps in the timeline."""
_DONE: Mapping[What, tuple[str, str]] = {
    "wait": ("waits for a batch", "#c3cad2"),
    "train": ("trains", "#0072B2"),
    "sync": ("sends weights", "#E69F00"),
    "switch": ("switches with the engines", "#CC79A7"),
    "generate": ("generates", "#009E73"),
    "pause": ("pauses for an update", "#D55E00"),
}
"""Activities of processes: description and colour."""
_NOTE = "If generation and training overlap, engines generate while the trainer trains."


def section(runs: Mapping[str, RunRecords]) -> PageSection:
    """Return the timeline of each run that has spans and steps; folded if there are several runs."""
    found = [figure for name, run in runs.items() for figure in _figure(f"{name} · " if len(runs) > 1 else "", run)]
    return PageSection("Timeline", _NOTE, found, wide=True, folded=len(runs) > 1)


def _figure(name: str, run: RunRecords) -> Iterator[Figure]:
    """Yield a figure with a bar for each activity of a process, in seconds since the start of the first step, and a line at the end of each
    step; nothing for a run of no duration."""
    steps = (run.rl or run.steps)[-RECENT:]
    if not run.spans or not steps or steps[-1].time <= steps[0].begin:
        return
    begin, window = steps[0].begin, [(steps[0].begin, steps[-1].time)]
    lanes, traces = ["trainer.0", *run.engines[:MAX_ENGINES]], []
    for what, (words, colour) in _DONE.items():
        bars = [(lane, one) for lane in lanes for one in intersection(run.intervals(what, lane), window)]
        trace = {
            "type": "bar",
            "orientation": "h",
            "name": words,
            "y": [lane for lane, _ in bars],
            "base": [round(first - begin, 4) for _, (first, _) in bars],
            "x": [round(last - first, 4) for _, (first, last) in bars],
            "marker": {"color": colour},
        }
        traces.append(trace)
    ends = [(step.time - begin, f"step {rl_step(run, step)}" if step.phase == "rl" else f"warm-up {step.step}") for step in steps]
    lines = [{"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 1, "dash": "dot"}} for x, _ in ends]
    marks = [{"x": x, "y": 1, "yref": "paper", "yanchor": "bottom", "text": text, "showarrow": False} for x, text in ends]
    share = overlap_share(run)
    title = f"{name}Last {len(steps)} steps"
    title += "" if share is None else f"; an engine generates during {percent(share)} of all RL training"
    axes = axis(), axis(autorange="reversed", type="category", categoryarray=lanes)
    legend = {"orientation": "h", "y": -0.2}
    look = layout(160 + 26 * len(lanes), *axes, barmode="overlay", hovermode="closest", shapes=lines, annotations=marks, legend=legend)
    yield Figure(title, _NOTE, "seconds", traces, look)
