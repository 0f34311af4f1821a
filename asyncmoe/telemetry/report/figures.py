"""The page's figures as Plotly takes them: those that metrics declare, one for every other recorded metric, and runs overlaid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from typing import Any

from asyncmoe.telemetry.metric import Metric
from asyncmoe.telemetry.report.series import Drawn, RecordedSeries, Row, grid, recorded, running_mean, thinned
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout
from asyncmoe.telemetry.run import RunRecords
from asyncmoe.telemetry.schema import Step

SECTIONS: Mapping[str, str] = {
    "Learning": "",
    "Staleness": "Age: the trainer's version minus the version that sampled the token.",
    "Agreement of engines and trainer": "How far apart the two are in what they make of the same tokens. Where routing is kept, tokens "
    "that the trainer's router would have sent elsewhere are trained through the experts that sampled them.",
    "Idle time and queue": "Who waits for whom.",
    "Weight updates": "",
    "Throughput": "",
    "Everything else that is recorded": "",
}
"""Titles and notes of the sections with figures of metrics; the last has the metrics without a plot."""
REST = [*SECTIONS][-1]
MOST_CURVES = 32
"""Curves of a run in a figure; the text about the figure says if there are more."""
COLOURS = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"),
    *("#7a6a00", "#30363d", "#8250df", "#bf3989", "#116329", "#a40e26"),
)
"""The first are Okabe and Ito's, which colour-blind readers can distinguish."""
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SCALE = ((0, "#f7fafc"), (0.25, "#b9dcef"), (0.6, "#3d93c4"), (1, "#08306b"))
_KINDS: Mapping[type[Drawn], str] = {Evaluation: "RL step", Step: "RL step", Rollout: "minutes of RL"}
_JAGGED_FROM, _JAGGED_SHARE = 16, 0.4
_WARMUP, _WARMUP_LOSS = "Warm-up loss", Metric("Loss of the supervised warm-up.", "loss")


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
    """A section of figures. wide: a figure has the width of the page; folded: it is closed at first."""

    title: str
    note: str
    figures: Sequence[Figure]
    wide: bool = False
    folded: bool = False


@dataclass(frozen=True)
class _Curve:
    """A curve of a run. field: the metric's name; number: that among the curves of its run in the figure."""

    run: str
    name: str
    field: str
    number: int
    metric: Metric
    kind: type[Drawn]
    rows: Sequence[Row]
    """x, y, and the standard error of y, or None."""


def sections(runs: Mapping[str, RunRecords]) -> list[PageSection]:
    """Return the figures of the metrics of runs by name, as far as there is data."""
    curves: dict[tuple[str, str], list[_Curve]] = {}
    for kind in _KINDS:
        for name, run in runs.items():
            for title, curve in _curves(name, run, kind):
                section = REST if curve.metric.plot is None else curve.metric.plot.section
                curves.setdefault((section, title), []).append(curve)
    for name, run in runs.items():
        if rows := thinned([(step.step, step.loss, None) for step in run.steps if step.phase == "warmup" and step.loss is not None]):
            curves.setdefault(("Learning", _WARMUP), []).append(_Curve(name, "", "loss", 0, _WARMUP_LOSS, Step, rows))
    found: dict[str, list[Figure]] = {title: [] for title in SECTIONS}
    for (section, title), drawn in curves.items():
        if (plot := drawn[0].metric.plot) is not None and plot.heat is not None:
            measured = dict.fromkeys(curve.run for curve in drawn)
            found[section] += [_heat(f"{title} · {name}" if len(runs) > 1 else title, runs[name], drawn[0]) for name in measured]
        else:
            found[section].append(_lines(title, drawn, list(runs)))
    return [PageSection(title, note, found[title], folded=title == REST) for title, note in SECTIONS.items()]


def heat_map(
    title: str, about: str, labels: tuple[str, str, str], x: Sequence[float | None], keys: Sequence[str], values: Sequence[Row]
) -> Figure:
    """Return a heat map.

    Args:
        labels: of the x axis, of the keys, and the unit of the values.
        values: those of each key.
    """
    unit = " %" if labels[2].endswith("%") else ""
    trace = {
        "type": "heatmap",
        "x": x,
        "y": keys,
        "z": [[_short(value) for value in row] for row in values],
        "zmin": 0,
        "colorscale": _SCALE,
        "colorbar": {"thickness": 9, "outlinewidth": 0, "ticksuffix": unit},
        "hoverongaps": False,
        "ygap": 1,
        "hovertemplate": f"{labels[0]} %{{x}}<br>{labels[1]} %{{y}}: %{{z:.3~g}}{unit}<extra></extra>",
    }
    axes = {"xaxis": _axis(labels[0], showgrid=False), "yaxis": _axis(labels[1], type="category", showgrid=False)}
    return Figure(title, about, labels[2], [trace], _layout(266, hovermode="closest", **axes))


def _curves(run_name: str, run: RunRecords, kind: type[Drawn]) -> Iterator[tuple[str, _Curve]]:
    """Yield the curves of a run's records of a kind, with the titles of their figures."""
    found = recorded(run, kind)
    numbers: dict[str, int] = {}
    for name in sorted(found, key=[*kind.__struct_fields__, *found].index):
        one, plot = found[name], found[name].metric.plot
        title = f"{kind.__name__.lower()}: {name.replace('_', ' ')}" if plot is None else plot.figure
        errors = found.get(plot.error) if plot is not None else None
        for key, points in one.ordered:
            label = " ".join(part for part in ("" if plot is None else plot.curve, key) if part)
            own = f"{title} {key}" if plot is not None and plot.apart else title
            number = numbers[own] = numbers.get(own, -1) + 1
            rows = thinned(_with_errors(points, errors, key))
            yield own, _Curve(run_name, "" if own != title else label, name, number, _about(one.metric, errors), kind, rows)


def _with_errors(points: Sequence[tuple[float, float]], errors: RecordedSeries | None, key: str) -> list[Row]:
    known = dict(errors.curves.get(key, ())) if errors is not None else {}
    return [(x, y, known.get(x)) for x, y in points]


def _about(metric: Metric, errors: RecordedSeries | None) -> Metric:
    return metric if errors is None else replace(metric, help=f"{metric.help} Bars: {errors.metric.help}")


def _heat(title: str, run: RunRecords, curve: _Curve) -> Figure:
    keys, columns = grid(run, curve.kind, curve.field, curve.metric)
    x, *values = zip(*columns, strict=True)
    labels = (_KINDS[curve.kind], curve.metric.key, _unit(curve.metric))
    return heat_map(title, curve.metric.help, labels, x, [f"{key:g}" for key in keys], values)


def _lines(title: str, curves: Sequence[_Curve], runs: Sequence[str]) -> Figure:
    shown, metric = [curve for curve in curves if curve.number < MOST_CURVES], curves[0].metric
    about = " ".join(dict.fromkeys(curve.metric.help for curve in curves))
    about += f" {len(shown)} of {len(curves)} curves are drawn." if len(shown) < len(curves) else ""
    named = len(runs) > 1 or any(curve.name for curve in curves)
    data = [trace for curve in shown for trace in _traces(curve, runs, named)]
    rows = -(-sum(trace["showlegend"] for trace in data) // 3)
    floor = {"rangemode": "tozero"} if metric.plot is not None and metric.plot.from_zero else {}
    axes = {"xaxis": _axis("warm-up step" if title == _WARMUP else _KINDS[curves[0].kind]), "yaxis": _axis("", **floor)}
    legend = {"orientation": "h", "x": 0, "y": -0.24, "yanchor": "top", "tracegroupgap": 0}
    return Figure(title, about, _unit(metric), data, _layout(248 + 18 * min(rows, 12), hovermode="x unified", legend=legend, **axes))


def _traces(curve: _Curve, runs: Sequence[str], named: bool) -> Iterator[dict[str, Any]]:
    """Yield a curve and, if it turns so often that only its running mean shows where it goes, that."""
    several = len(runs) > 1
    name = escape(" · ".join(part for part in (curve.run if several else "", curve.name) if part), quote=False)
    colour = COLOURS[(runs.index(curve.run) if several else curve.number) % len(COLOURS)]
    line = {"color": colour, "width": 1.6, "dash": _DASHES[curve.number % len(_DASHES)] if several else "solid"}
    x, y, errors = ([_short(value) for value in column] for column in zip(*curve.rows, strict=True))
    common = {"type": "scatter", "x": x, "legendgroup": f"{curve.run} {curve.number}", "hovertemplate": "%{y:.4~g}%{customdata}"}
    values = [value or 0.0 for value in y]
    jagged = _jagged(values)
    yield {
        **common,
        "y": y,
        "name": name or "each",
        "mode": "lines" if len(x) > 30 else "lines+markers",
        "line": line,
        "marker": {"size": 4},
        "opacity": 0.3 if jagged else 1,
        "showlegend": named and not jagged,
        "customdata": ["" if error is None else f" ± {error:.3g}" for error in errors],
        **({"error_y": {"array": errors, "color": colour, "thickness": 1, "width": 3}} if any(errors) else {}),
    }
    if jagged:
        mean = {"y": [_short(value) for value in running_mean(values)], "name": f"{name}, running mean" if name else "running mean"}
        look = {"mode": "lines", "line": {**line, "width": 2.2}, "showlegend": True, "customdata": [""] * len(x)}
        yield {**common, **mean, **look}


def _jagged(y: Sequence[float]) -> bool:
    rises = [after - before for before, after in pairwise(y) if after != before]
    turns = sum((before > 0) != (after > 0) for before, after in pairwise(rises))
    return len(y) >= _JAGGED_FROM and turns > _JAGGED_SHARE * len(y)


def _layout(height: int, **more: Any) -> dict[str, Any]:
    return {
        "height": height,
        "font": {"family": 'system-ui, "DejaVu Sans", sans-serif', "size": 11, "color": "#30363d"},
        "margin": {"l": 8, "r": 10, "t": 24, "b": 8},
        "plot_bgcolor": "#fff",
        "hoverlabel": {"font": {"size": 11}, "namelength": -1, "align": "left"},
        **more,
    }


def _axis(title: str, **more: Any) -> dict[str, Any]:
    words = {"title": {"text": title, "standoff": 4}} if title else {}
    return {**words, "automargin": True, "gridcolor": "#eef1f4", "exponentformat": "e", "zeroline": False, **more}


def _unit(metric: Metric) -> str:
    if metric.plot is not None and metric.plot.heat == "share":
        return f"share of {metric.unit}, %"
    return f"{metric.unit}, %" if metric.is_share else metric.unit or "number"


def _short(value: float | None) -> float | None:
    """Round to 6 significant digits: more are not visible, and the page is smaller."""
    return None if value is None else float(f"{value:.6g}")
