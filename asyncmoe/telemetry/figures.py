"""The report's figures: those that metrics declare, and the few that no single metric makes. Each is None without data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from asyncmoe.telemetry import series
from asyncmoe.telemetry.format import number, percent
from asyncmoe.telemetry.metric import Colour, Metric, Plot, declared
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout
from asyncmoe.telemetry.run import RunRecords
from asyncmoe.telemetry.schema import Step
from asyncmoe.telemetry.series import Series

# Okabe and Ito's palette, which colour-blind readers can distinguish.
BLUE, GREEN, ORANGE, RED, PURPLE, GREY = "#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#C9CED6"
INK, FAINT = "#30363d", "#e6e9ed"
_PALETTE: dict[Colour, str] = {"grey": GREY, "blue": BLUE, "green": GREEN, "orange": ORANGE, "red": RED, "purple": PURPLE}

_STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "asyncmoe",
}
_PATH = re.compile(r'\bd="[^"]*"')
_DECIMALS = re.compile(r"(\.\d\d)\d+")

Curve = tuple[str, Series, str]
"""Label, points, colour."""


@dataclass(frozen=True)
class _Drawn:
    """A metric that is declared with a plot."""

    kind: type[series.Drawn]
    name: str
    metric: Metric
    plot: Plot


_KINDS: tuple[type[series.Drawn], ...] = (Step, Rollout, Evaluation)
_DRAWN = [_Drawn(kind, name, metric, metric.plot) for kind in _KINDS for name, metric in declared(kind).items() if metric.plot is not None]


def titles(section: str) -> list[str]:
    """Return the titles of the declared figures of a section of the report, in the order of their metrics' fields."""
    return list(dict.fromkeys(drawn.plot.figure for drawn in _DRAWN if drawn.plot.section == section))


def declared_figures(run: RunRecords, title: str) -> list[Picture | None]:
    """Draw the declared metrics of the figure with this title: one figure, or one for each key of a mapping."""
    members = [drawn for drawn in _DRAWN if drawn.plot.figure == title]
    first, *_ = members
    if first.plot.bars is not None:
        return [_bars(run, first)]
    unit = f"{first.metric.unit}, %" if first.metric.is_share else first.metric.unit
    floor = 0 if first.plot.from_zero else None
    x = "minutes of RL" if first.kind is Rollout else "RL step"
    curves = [curve for drawn in members for curve in _of_metric(run, drawn)]
    if first.plot.apart:
        return [_curves(f"{title} {key}", unit, [("", points, colour)], x=x, floor=floor) for key, points, colour in curves]
    return [_curves(title, unit, curves, x=x, floor=floor)]


def _of_metric(run: RunRecords, drawn: _Drawn) -> list[Curve]:
    found = series.curves(run, drawn.kind, drawn.name, drawn.metric)
    start = list(_PALETTE).index(drawn.plot.colour)
    colours = [*_PALETTE.values()][start:] + [*_PALETTE.values()][:start]
    if drawn.plot.smooth and len(found[0][1].y) >= 8:
        points = found[0][1]
        return [("each step", points, GREY), ("running mean", points.smooth(), colours[0])]
    return [(key or drawn.plot.curve, points, colours[i % len(colours)]) for i, (key, points) in enumerate(found)]


def _bars(run: RunRecords, drawn: _Drawn) -> Picture | None:
    heights = series.bars(run, drawn.kind, drawn.name, drawn.metric)
    if not heights:
        return None
    per_cent = drawn.metric.is_share or drawn.plot.bars == "share"
    unit = f"share of {drawn.metric.unit.removeprefix('share of ')}, %" if per_cent else drawn.metric.unit
    with style():
        figure, axes = _axes(drawn.plot.figure, drawn.plot.keys or drawn.metric.key, unit)
        patches = axes.bar(list(heights), list(heights.values()), color=_PALETTE[drawn.plot.colour], width=0.7)
        if len(heights) <= 12:
            labels = [percent(height / 100) if per_cent else number(height) for height in heights.values()]
            axes.bar_label(patches, labels=labels, fontsize=8, padding=2)
        axes.set_ylim(0, max(1.12 * max(heights.values()), 1e-3))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        return picture(figure)


def warmup_loss(run: RunRecords) -> Picture | None:
    """Loss of the supervised warm-up."""
    return _curves("Warm-up loss", "loss", [("", series.warmup_loss(run), PURPLE)], x="warm-up step")


def idle(run: RunRecords) -> Picture | None:
    """Idle share of trainer and engines in each step."""
    curves = [("trainer", series.trainer_idle(run), BLUE), ("engines", series.engine_idle(run), GREEN)]
    return _curves("Idle", "share of the step, %", curves, floor=0, ceiling=100)


class Picture(NamedTuple):
    """A drawn figure: SVG text, and `alt`, what it shows in words."""

    svg: str
    alt: str


def picture(figure: Any) -> Picture:
    """Render a figure with one pair of axes, deterministically, with path coordinates truncated to a hundredth of a point."""
    file = BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return Picture(_PATH.sub(lambda path: _DECIMALS.sub(r"\1", path.group()), file.getvalue().decode()), _described(figure))


def _described(figure: Any) -> str:
    """Return what the figure's title, axes and legend say."""
    (axes,) = figure.axes
    lanes = [label.get_text() for label in axes.get_yticklabels()] if not axes.get_ylabel() else []
    legends = [legend for legend in (axes.get_legend(), *figure.legends) if legend is not None]
    told = [text.get_text() for legend in legends for text in legend.get_texts()]
    shown = f"{axes.get_title(loc='left')}: {axes.get_ylabel() or ', '.join(reversed(lanes))} over {axes.get_xlabel()}"
    return f"{shown} ({', '.join(told)})" if told else shown


def style() -> Any:
    """Return a context manager with the style of all figures."""
    return matplotlib.rc_context(_STYLE)


def _curves(
    title: str, unit: str, curves: Sequence[Curve], *, x: str = "RL step", floor: float | None = None, ceiling: float | None = None
) -> Picture | None:
    curves = [curve for curve in curves if curve[1].y]
    if not curves:
        return None
    with style():
        figure, axes = _axes(title, x, unit)
        for label, points, colour in curves:
            marker = "o" if len(points.y) <= 30 else ""
            axes.plot(points.x, points.y, color=colour, linewidth=1.4, marker=marker, markersize=3, label=label)
        _limits(axes, curves, floor, ceiling)
        if x != "minutes of RL":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        if len(curves) > 1:
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(curves), borderaxespad=0.2)
        return picture(figure)


def _limits(axes: Any, curves: Sequence[Curve], floor: float | None, ceiling: float | None) -> None:
    top = max(max(points.y) for _, points, _ in curves)
    if ceiling is not None:
        # Margin that keeps a curve along the border visible.
        axes.set_ylim((floor or 0) - 2, ceiling + 2)
    elif floor is not None:
        axes.set_ylim(floor - 0.02 * (top or 1), 1.08 * top if top > 0 else 1)


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    figure = Figure(figsize=(5.4, 2.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, parse_math=False)  # a user's name of a metric may contain any character
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y")
    return figure, axes
