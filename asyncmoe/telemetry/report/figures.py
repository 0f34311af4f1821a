"""The page's figures as data: those that metrics declare, the few that no single metric makes, and every other recorded metric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args, get_type_hints

import msgspec

from asyncmoe.telemetry.metric import Colour, Metric, Plot, declared
from asyncmoe.telemetry.report import series
from asyncmoe.telemetry.report.series import Drawn, Series
from asyncmoe.telemetry.rollout_schema import Calls, Evaluation, Rollout, Scoring
from asyncmoe.telemetry.run import RunRecords
from asyncmoe.telemetry.schema import Step

REST = "Everything else that is recorded"
"""Title of the section of metrics without a plot of their own."""
MOST_CURVES = 32
"""Curves of a figure; the text about the figure says if there are more."""


@dataclass(frozen=True)
class Curve:
    """A curve: ascending `x`, `y` of the same length. jagged: the page adds its running mean; errors: length of the error bar of each `y`
    to either side, or nothing."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: Colour
    jagged: bool
    errors: Sequence[float | None] = ()


@dataclass(frozen=True)
class Lines:
    """A figure with curves. `about`: what it shows, in a sentence; `x` and `y`: labels; `floor` and `ceiling`: fixed ends of the y axis."""

    title: str
    about: str
    x: str
    y: str
    curves: Sequence[Curve]
    floor: float | None = None
    ceiling: float | None = None
    kind: Literal["lines"] = "lines"


@dataclass(frozen=True)
class Bars:
    """A figure with a bar for each key."""

    title: str
    about: str
    x: str
    y: str
    keys: Sequence[float]
    heights: Sequence[float]
    colour: Colour
    kind: Literal["bars"] = "bars"


@dataclass(frozen=True)
class Heat:
    """A heat map: a value for each key (row) and each of `columns`; `unit` is that of the values."""

    title: str
    about: str
    x: str
    y: str
    unit: str
    columns: Sequence[float]
    keys: Sequence[float]
    values: Sequence[Sequence[float | None]]
    kind: Literal["heat"] = "heat"


Figure = Lines | Bars | Heat


@dataclass(frozen=True)
class _Member:
    """A metric that is declared with a plot."""

    kind: type[Drawn]
    name: str
    metric: Metric
    plot: Plot


_KINDS: tuple[type[Drawn], ...] = (Step, Rollout, Evaluation)
_MEMBERS = [_Member(kind, name, metric, metric.plot) for kind in _KINDS for name, metric in declared(kind).items() if metric.plot]
_COLOURS: tuple[Colour, ...] = get_args(Colour)
_X: Mapping[type[Drawn], str] = {Step: "RL step", Rollout: "minutes of RL", Evaluation: "RL step"}


def titles(section: str) -> list[str]:
    """Return the titles of the declared figures of a section of the report, in the order of their metrics' fields."""
    return list(dict.fromkeys(member.plot.figure for member in _MEMBERS if member.plot.section == section))


def declared_figures(run: RunRecords, title: str) -> Iterator[Figure]:
    """Yield the figures of the declared metrics with this title, as far as there is data: curves; for a mapping to be drawn in bars, these
    and its heat map over the steps; or one figure for each key of a mapping."""
    members = [member for member in _MEMBERS if member.plot.figure == title]
    first, *_ = members
    if first.plot.bars is not None:
        yield from _bars(run, first)
        return
    floor = 0.0 if first.plot.from_zero else None
    about = " ".join(_about(member) for member in members)
    curves = [curve for member in members for curve in _curves(run, member)]
    if first.plot.apart:
        for curve in curves:
            yield from _lines(f"{title} {curve.name}", about, _X[first.kind], _unit(first.metric), [replace(curve, name="")], floor)
    else:
        yield from _lines(title, about, _X[first.kind], _unit(first.metric), curves, floor)


def rest(run: RunRecords) -> Iterator[Figure]:
    """Yield a figure for each metric without a plot of its own, as far as there is data."""
    for kind in _KINDS:
        hints = get_type_hints(kind)
        for name, metric in declared(kind).items():
            if metric.plot is not None:
                continue
            title = f"{kind.__name__.lower()}: {name.replace('_', ' ')}"
            if (inner := _inner(hints[name])) is None:
                yield from _plain(title, metric, series.curves(run, kind, name, metric), kind)
                continue
            for part, of_part in declared(inner).items():
                yield from _plain(f"{title} {part.replace('_', ' ')}", of_part, series.parts(run, name, part, of_part), kind)


def warmup_loss(run: RunRecords) -> Iterator[Figure]:
    """Yield the loss of the supervised warm-up."""
    curve = _curve("", series.warmup_loss(run), "purple")
    return _lines("Warm-up loss", "Loss of the supervised warm-up.", "warm-up step", "loss", [curve], None)


def idle(run: RunRecords) -> Iterator[Figure]:
    """Yield the idle share of trainer and engines in each step."""
    curves = [_curve("trainer", series.trainer_idle(run), "blue"), _curve("engines", series.engine_idle(run), "green")]
    about = "Share of a step in which the trainer waited for a batch, and in which an engine generated nothing (mean over engines)."
    return _lines("Idle", about, "RL step", "share of the step, %", curves, 0.0, 100.0)


def _bars(run: RunRecords, member: _Member) -> Iterator[Figure]:
    heights = series.bars(run, member.kind, member.name, member.metric)
    if not heights:
        return
    metric, plot = member.metric, member.plot
    per_cent = metric.is_share or plot.bars == "share"
    unit = f"share of {metric.unit.removeprefix('share of ')}, %" if per_cent else metric.unit
    keys = plot.keys or metric.key
    found = series.grid(run, member.kind, member.name, metric)
    values = [[_short(value) for value in row] for row in found.values]
    yield Heat(f"{plot.figure}, over the steps", metric.help, _X[member.kind], keys, unit, found.x, found.keys, values)
    rounded = [_short(height) or 0.0 for height in heights.values()]
    yield Bars(f"{plot.figure}, all steps", metric.help, keys, unit, list(heights), rounded, plot.colour)


def _curves(run: RunRecords, member: _Member) -> list[Curve]:
    found = series.curves(run, member.kind, member.name, member.metric)
    start = _COLOURS.index(member.plot.colour)
    names = [" ".join(part for part in (member.plot.curve, key) if part) for key, _ in found]
    return [
        _curve(name, points, _COLOURS[(start + i) % len(_COLOURS)]) for i, (name, (_, points)) in enumerate(zip(names, found, strict=True))
    ]


def _plain(title: str, metric: Metric, found: Sequence[tuple[str, Series]], kind: type[Drawn]) -> Iterator[Figure]:
    curves = [_curve(name, points, _COLOURS[1 + i % (len(_COLOURS) - 1)]) for i, (name, points) in enumerate(found)]
    return _lines(title, metric.help, _X[kind], _unit(metric), curves, None)


def _lines(
    title: str, about: str, x: str, y: str, curves: Sequence[Curve], floor: float | None, ceiling: float | None = None
) -> Iterator[Figure]:
    known = [curve for curve in curves if curve.y]
    if len(known) > MOST_CURVES:
        about = f"{about} The first {MOST_CURVES} of {len(known)} are drawn."
    if known:
        yield Lines(title, about, x, y, known[:MOST_CURVES], floor, ceiling)


def _curve(name: str, points: Series, colour: Colour) -> Curve:
    x = [_short(value) or 0.0 for value in points.x]
    y, errors = [_short(value) or 0.0 for value in points.y], [_short(value) for value in points.errors]
    return Curve(name, x, y, colour, points.jagged, errors)


def _about(member: _Member) -> str:
    error = member.plot.error
    return f"{member.metric.help} Bars: {declared(member.kind)[error].help}" if error else member.metric.help


def _unit(metric: Metric) -> str:
    return f"{metric.unit}, %" if metric.is_share else metric.unit or "number"


def _short(value: float | None) -> float | None:
    """Round to 6 significant digits: more are not visible, and the page is smaller."""
    return None if value is None else float(f"{value:.6g}")


def _inner(hint: object) -> type[msgspec.Struct] | None:
    """Return the record that a field maps names to."""
    return next((record for record in (Scoring, Calls) if record in get_args(hint)), None)
