"""Curves of arms with bands over their seeds, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure

from benchmarks.learning.arms import ARMS
from benchmarks.learning.curves import Point, against_seconds, together
from benchmarks.learning.style import BLUE, GREEN, INK, ORANGE, PURPLE, RED, style
from benchmarks.learning.summary import Runs

Axis = Literal["samples", "seconds"]
Panel = tuple[str, Axis, str]
"""Name of a figure of `curves.curves`, or "accuracy"; what it is drawn against; its title."""

COLOURS = (BLUE, RED, GREEN, ORANGE, PURPLE, INK)
DENSE: Sequence[Panel] = (
    ("accuracy", "samples", "Held-out accuracy against samples"),
    ("accuracy", "seconds", "Held-out accuracy against seconds"),
)
MIXTURE: Sequence[Panel] = (
    ("accuracy", "samples", "Held-out accuracy, greedy"),
    ("train_infer_kl", "samples", "KL(engine || trainer), nats a token"),
    ("ess", "samples", "Effective sample size, share"),
)


def svg(runs: Runs, panels: Sequence[Panel]) -> str:
    """Draw panels side by side: a line for each arm, the mean over its seeds, and the band of its 95 % interval. Panels that no arm has
    figures for are left out; "" if all are."""
    drawn = [(title, axis, lines) for name, axis, title in panels if (lines := _lines(runs, name, axis))]
    if not drawn:
        return ""
    with style():
        figure = Figure(figsize=(4.4 * len(drawn), 3.4), layout="constrained")
        keys: dict[str, Any] = {}
        for place, (title, axis, lines) in zip(np.atleast_1d(figure.subplots(1, len(drawn))), drawn, strict=True):
            for arm, points in lines.items():
                at, mean, half = np.array(points).T
                colour = COLOURS[list(runs).index(arm) % len(COLOURS)]
                dashed = "--" if list(runs).index(arm) >= len(COLOURS) else "-"
                (keys[arm],) = place.plot(at, mean, dashed, color=colour, linewidth=1.4)
                place.fill_between(at, mean - half, mean + half, color=colour, alpha=0.12, linewidth=0)
            place.set(title=title, xlabel=axis)
            place.grid(axis="y")
            if title.startswith(("Held-out", "Effective")):
                place.set_ylim(0, 1.02)
        # Below the panels, where it hides no curve.
        figure.legend(keys.values(), keys.keys(), loc="outside lower center", ncols=min(4, len(keys)))
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def by_arm(runs: Sequence[Mapping[str, Any]]) -> Runs:
    """Sort records by arm, in the order of `ARMS`."""
    found = {arm.name: [one for one in runs if one["arm"] == arm.name] for arm in ARMS}
    return {name: those for name, those in found.items() if those}


def _lines(runs: Runs, name: str, axis: Axis) -> dict[str, list[Point]]:
    found = {arm: against_seconds(those, name) if axis == "seconds" else together(those, name) for arm, those in runs.items()}
    return {arm: points for arm, points in found.items() if len(points) > 1}
