"""The page's figures for Plotly: those of `plots`, and one for every other recorded metric; runs are overlaid."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from asyncmoe.telemetry.distribution import grid_step, on_grid
from asyncmoe.telemetry.measured import mean
from asyncmoe.telemetry.metric import Metric, numbers
from asyncmoe.telemetry.report.plots import PLOTS, REST, SECTIONS, Drawn, Plot
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout
from asyncmoe.telemetry.run import RunRecords
from asyncmoe.telemetry.schema import Step

MOST_POINTS = 500
MOST_CURVES = 32
"""Maximum curves of a run in a figure."""
COLOURS = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"),
    *("#948200", "#7d8590", "#9a6bff", "#d2469b", "#9a6324", "#e5484d"),
)
"""Colours that are legible on white and on black. The first ones are Okabe and Ito's, which colour-blind readers can distinguish."""
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_KINDS: Mapping[type[Drawn], str] = {Evaluation: "RL step", Step: "RL step", Rollout: "minutes of RL"}
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
Row = tuple[float | None, ...]
"""x and the values at x; None: not measured."""


@dataclass(frozen=True)
class Figure:
    """A figure: Plotly's traces and layout. about: what it shows."""

    title: str
    about: str
    unit: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]


@dataclass(frozen=True)
class PageSection:
    """A section of figures. wide: figures span the page; folded: initially closed."""

    title: str
    note: str
    figures: Sequence[Figure]
    wide: bool = False
    folded: bool = False


@dataclass(frozen=True)
class Curve:
    """A metric of a run, or one key of a metric that is a mapping.

    Attributes:
        run, name: names of the run, and of this curve among the run's curves in a figure.
        key: key of the mapping; "" for a plain number.
        points: y by x; shares are in per cent.
        errors: standard error of y by x, where known.
    """

    run: str
    name: str
    key: str
    metric: Metric
    points: Mapping[float, float]
    errors: Mapping[float, float]


Recorded = Mapping[str, tuple[Metric, Mapping[str, Mapping[float, float]]]]
"""Metrics by name: the declaration, and y by x for each key of a mapping (a plain number has one key); shares are in per cent."""


def sections(runs: Mapping[str, RunRecords]) -> list[PageSection]:
    """Return the sections with the figures of runs (by name) for which there is data."""
    recorded = {(kind, name): _recorded(run, kind) for kind in _KINDS for name, run in runs.items()}
    named = {(plot.kind, field) for plot in PLOTS for field in plot.curves}
    others = dict.fromkeys((kind, field) for (kind, _), metrics in recorded.items() for field in metrics if (kind, field) not in named)
    rest = [Plot(kind, REST, f"{kind.__name__.lower()}: {field.replace('_', ' ')}", {field: ""}, False) for kind, field in others]
    found: dict[str, list[Figure]] = {title: [] for title in SECTIONS}
    for plot in (*PLOTS, *rest):
        if plot.kind is Evaluation and len(runs) > 1:  # every set of every run in one figure would be too many curves
            plot = replace(plot, apart=True)
        figures: dict[str, list[Curve]] = {}
        for name in runs:
            for curve in _curves(plot, name, recorded[plot.kind, name]):
                more = f" {curve.key}".rstrip() if plot.apart else f" · {name}" if plot.heat and len(runs) > 1 else ""
                figures.setdefault(plot.title + more, []).append(curve)
        found[plot.section] += [
            _heat(title, curves, plot) if plot.heat else _lines(title, curves, plot, list(runs)) for title, curves in figures.items()
        ]
    return [PageSection(title, note, found[title], folded=title == REST) for title, note in SECTIONS.items()]


def _placed(run: RunRecords, kind: type[Drawn]) -> Sequence[tuple[float, Drawn]]:
    """Return the records of a kind with their x: for steps the RL step, for evaluations the RL step evaluated, for rollout records the
    minutes of RL time since the first RL step began."""
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


def rl_step(run: RunRecords, step: Step) -> int:
    """Return the step's number since the start of reinforcement learning; the first step is 1."""
    return step.step - run.rl[0].step + 1


def _recorded(run: RunRecords, kind: type[Drawn]) -> Recorded:
    """Return the measured metrics of a run's records of a kind."""
    found: dict[str, tuple[Metric, dict[str, dict[float, float]]]] = {}
    for x, record in _placed(run, kind):
        of_set = record.name if isinstance(record, Evaluation) else ""
        for one in numbers(record):
            key = " ".join(part for part in (of_set, one.key) if part)
            _, keys = found.setdefault(one.name, (one.metric, {}))
            keys.setdefault(key, {})[x] = 100 * one.value if one.metric.is_share else one.value
    return found


def _curves(plot: Plot, run: str, recorded: Recorded) -> list[Curve]:
    """Return the curves of a run in a figure; those of a mapping by ascending key."""
    found = []
    for field in (field for field in plot.curves if field in recorded):
        metric, keys = recorded[field]
        errors = recorded[plot.error][1] if plot.error in recorded else {}
        for key in sorted(keys, key=lambda key: (float(key) if _NUMBER.fullmatch(key) else math.inf, key)):
            name = "" if plot.apart else " ".join(part for part in (plot.curves[field], key) if part)
            found.append(Curve(run, name, key, metric, keys[key], errors.get(key, {})))
    return found


def _heat(title: str, curves: Sequence[Curve], plot: Plot) -> Figure:
    """Return the heat map of a mapping from numbers: its values, or the share of each in their total, in per cent, on one grid of keys."""
    metric, x_axis, shares = curves[0].metric, _KINDS[plot.kind], plot.heat == "share"
    places = [float(curve.key) for curve in curves]
    step = grid_step(min(places), max(places)) if shares else 0.0
    columns: dict[float, dict[float, float]] = {}
    for place, curve in zip(places, curves, strict=True):
        for x, y in curve.points.items():
            column, key = columns.setdefault(x, {}), on_grid(place, step)
            column[key] = column.get(key, 0.0) + y
    keys = sorted({on_grid(place, step) for place in places})
    absent = 0.0 if shares else None
    whole = {x: sum(column.values()) / 100 if shares else 1.0 for x, column in columns.items()}
    rows = [
        (x, *(column[key] / whole[x] if key in column else absent for key in keys)) for x, column in sorted(columns.items()) if whole[x]
    ]
    xs, *z = zip(*thinned(rows), strict=True)
    unit = f"share of {metric.unit}, %" if shares else _unit(metric)
    suffix = " %" if unit.endswith("%") else ""
    trace = {
        "type": "heatmap",
        "x": xs,
        "y": [f"{key:g}" for key in keys],
        "z": [[_short(value) for value in row] for row in z],
        "zmin": 0,
        "colorbar": {"thickness": 9, "outlinewidth": 0, "ticksuffix": suffix},
        "ygap": 1,
        "hovertemplate": f"{x_axis} %{{x}}<br>{metric.key} %{{y}}: %{{z:.3~g}}{suffix}<extra></extra>",
    }
    return Figure(title, metric.help, unit, [trace], layout(266, axis(x_axis), axis(metric.key, type="category"), hovermode="closest"))


def _lines(title: str, curves: Sequence[Curve], plot: Plot, runs: Sequence[str]) -> Figure:
    metric, several, data = curves[0].metric, len(runs) > 1, list[dict[str, Any]]()
    named = several or any(curve.name for curve in curves)
    numbers_of: Counter[str] = Counter()
    for curve in curves:
        number = numbers_of[curve.run]
        numbers_of[curve.run] += 1
        if number < MOST_CURVES:
            colour = COLOURS[(runs.index(curve.run) if several else number) % len(COLOURS)]
            name = " · ".join(part for part in (curve.run if several else "", curve.name) if part)
            look = {"color": colour, "width": 1.6, "dash": _DASHES[number % len(_DASHES)] if several else "solid"}
            data.append({**_trace(curve, colour), "name": escape(name, quote=False) or "each", "line": look, "showlegend": named})
    about = " ".join(dict.fromkeys(curve.metric.help for curve in curves))
    about += f" {len(data)} of {len(curves)} curves are drawn." if len(data) < len(curves) else ""
    about += " Bars: one standard error to either side." if any("error_y" in trace for trace in data) else ""
    floor = {"rangemode": "tozero"} if plot.from_zero else {}
    columns = max(1, 380 // (50 + 6 * max(len(trace["name"]) for trace in data)))
    words = 19 * min(-(-len(data) // columns), 12) * named
    legend = {"orientation": "h", "x": 0, "y": -0.24, "yanchor": "top", "maxheight": words + 10}
    axes = axis(_KINDS[plot.kind]), axis(hoverformat=".4~g", **floor)
    return Figure(title, about, _unit(metric), data, layout(248 + words, *axes, legend=legend))


def _trace(curve: Curve, colour: str) -> dict[str, Any]:
    rows = thinned([(x, y, curve.errors.get(x)) for x, y in curve.points.items()])
    x, y, errors = ([_short(value) for value in column] for column in zip(*rows, strict=True))
    bars = {"error_y": {"array": errors, "color": colour, "thickness": 1, "width": 3}} if any(errors) else {}
    mode = "lines" if len(rows) > 30 else "lines+markers"
    return {"type": "scatter", "x": x, "y": y, "mode": mode, "marker": {"size": 4}, **bars}


def thinned(rows: Sequence[Row]) -> list[Row]:
    """Average neighbouring rows, column by column, if there are more than `MOST_POINTS`."""
    size = -(-len(rows) // MOST_POINTS) or 1
    return [tuple(map(mean, zip(*rows[i : i + size], strict=True))) for i in range(0, len(rows), size)]


def layout(height: int, x_axis: Mapping[str, Any], y_axis: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the common layout of figures; their colours are the page's."""
    return {
        "height": height,
        "font": {"family": 'system-ui, "DejaVu Sans", sans-serif', "size": 11},
        "margin": {"l": 8, "r": 10, "t": 24, "b": 8},
        "hovermode": "x unified",
        "hoverlabel": {"font": {"size": 11}, "namelength": -1, "align": "left"},
        "xaxis": x_axis,
        "yaxis": y_axis,
        **more,
    }


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """Return an axis."""
    words = {"title": {"text": title, "standoff": 4}} if title else {}
    return {**words, "automargin": True, "exponentformat": "e", "zeroline": False, **more}


def _unit(metric: Metric) -> str:
    return f"{metric.unit}, %" if metric.is_share else metric.unit or "number"


def _short(value: float | None) -> float | None:
    """Round to 6 significant digits: more are not visible, and the page is smaller."""
    return None if value is None else float(f"{value:.6g}")
