"""One page of all arms: curves with 95 % intervals over the seeds, as SVG, and a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from benchmarks.learning.arms import ARMS
from benchmarks.learning.curves import band, reached, together

Point = tuple[float, float, float]
"""x, mean, half of the interval."""
_WIDE, _HIGH, _LEFT, _BELOW = 760, 300, 56, 40
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#bf3989", "#0a7ea4", "#57606a", "#e16f24", "#5c3d1e")
_FIGURES = (
    ("accuracy", "Held-out accuracy, greedy", "share of sums"),
    ("reward_mean", "Reward of the trained samples", "reward"),
    ("train_infer_kl", "KL(engine || trainer)", "nats a token"),
    ("ess", "Effective sample size", "share of the tokens"),
    ("entropy", "Entropy of the policy", "nats a token"),
    ("routing_mismatch", "Tokens the trainer's router would send elsewhere", "share of tokens, mean over layers"),
)
_STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
body { color: #1f2328; background: #fff }
table { border-collapse: collapse } td, th { padding: .25rem .75rem; border-bottom: 1px solid #d1d9e0; text-align: left }
svg { max-width: 100%; height: auto } svg text { font: 12px system-ui, sans-serif; fill: #57606a }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .4em }"""


def html(results: Mapping[str, Any], level: float) -> str:
    """Return the page.

    Args:
        results: as `runner.read` returns them.
        level: the accuracy whose first time is in the table.
    """
    by_arm = {arm.name: [one for one in results["runs"] if one["arm"] == arm.name] for arm in ARMS}
    by_arm = {name: runs for name, runs in by_arm.items() if runs}
    drawn = "\n".join(_figure(by_arm, *figure) for figure in _FIGURES)
    keys = " ".join(f'<span><i class="key" style="background:{_colour(name)}"></i>{escape(name)}</span>' for name in by_arm)
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Learning</title>'
    about = "Means over seeds, with the 95 % interval of the mean by Student's t. Every arm trains on the same prompts, batches and steps."
    return f"{head}<style>{_STYLE}</style><h1>A real model learns</h1><p>{about}</p><p>{keys}</p>{table(by_arm, level)}{drawn}</html>\n"


def table(by_arm: Mapping[str, Sequence[Mapping[str, Any]]], level: float) -> str:
    """Return a row for each arm: seeds, accuracy before and after, samples and seconds to `level`, tokens a second."""
    rows = ["<tr><th>arm<th>what it is<th>seeds<th>before<th>after" + f"<th>samples to {level:g}<th>seconds to {level:g}<th>tokens/s"]
    for name, runs in by_arm.items():
        told = [run["evaluations"] for run in runs]
        first, last = ([one["accuracy"][at] for one in told] for at in (0, -1))
        to = [[reached(one[axis], one["accuracy"], level) for one in told] for axis in ("samples", "seconds")]
        cells = [_interval(first), _interval(last), *map(_reached, to), _interval([run["tokens_per_s"] for run in runs])]
        about = next(arm.about for arm in ARMS if arm.name == name)
        rows.append(f"<tr><td>{escape(name)}<td>{escape(about)}<td>{len(runs)}" + "".join(f"<td>{cell}" for cell in cells))
    return f"<table>{''.join(rows)}</table>"


def _interval(values: Sequence[float]) -> str:
    mean, half = band(values)
    return f"{mean:.3g} ± {half:.2g}" if half else f"{mean:.3g}"


def _reached(values: Sequence[float | None]) -> str:
    there = [value for value in values if value is not None]
    missed = f", {len(values) - len(there)} never" if len(there) < len(values) else ""
    return (_interval(there) if there else "never") + (missed if there else "")


def _figure(by_arm: Mapping[str, Sequence[Mapping[str, Any]]], name: str, title: str, unit: str) -> str:
    lines = {arm: points for arm, runs in by_arm.items() if (points := together(runs, name))}
    if not lines:
        return ""
    every = [point for points in lines.values() for point in points]
    right, low, high = max(at for at, *_ in every), min(mean - half for _, mean, half in every), max(mean + half for _, mean, half in every)
    low, high = min(0.0, low) if name in ("accuracy", "ess") else low, high if high > low else low + 1.0
    drawn = "".join(_line(points, _colour(arm), right, low, high) for arm, points in lines.items())
    ticks = [low + share * (high - low) for share in (0, 0.25, 0.5, 0.75, 1)]
    grid = "".join(
        f'<path d="M{_LEFT} {_y(tick, low, high):.1f}H{_WIDE}" stroke="#eaeef2"/>'
        f'<text x="{_LEFT - 6}" y="{_y(tick, low, high) + 4:.1f}" text-anchor="end">{tick:.3g}</text>'
        for tick in ticks
    )
    below = f'<text x="{_LEFT}" y="{_HIGH - 8}">samples: 0</text><text x="{_WIDE}" y="{_HIGH - 8}" text-anchor="end">{right:g}</text>'
    return (
        f"<h2>{escape(title)}</h2><p>{escape(unit)}</p>"
        f'<svg viewBox="0 0 {_WIDE} {_HIGH}" role="img" aria-label="{escape(title)}">{grid}{drawn}{below}</svg>'
    )


def _line(points: Sequence[Point], colour: str, right: float, low: float, high: float) -> str:
    def path(of: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{_LEFT + at / right * (_WIDE - _LEFT):.1f},{_y(value, low, high):.1f}" for at, value in of)

    edge = [(at, mean + half) for at, mean, half in points] + [(at, mean - half) for at, mean, half in reversed(points)]
    middle = path([(at, mean) for at, mean, _ in points])
    return (
        f'<polygon points="{path(edge)}" fill="{colour}" fill-opacity="0.15"/>'
        f'<polyline points="{middle}" fill="none" stroke="{colour}" stroke-width="2"/>'
    )


def _y(value: float, low: float, high: float) -> float:
    return (high - value) / (high - low) * (_HIGH - _BELOW) + 6


def _colour(name: str) -> str:
    return _COLOURS[[arm.name for arm in ARMS].index(name) % len(_COLOURS)]
