"""Plots of comparisons and sweeps; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from asyncmoe.errors import DataError
from asyncmoe.simulate.compare import Comparison
from asyncmoe.simulate.style import BLUE, GREEN, INK, ORANGE, PURPLE, RED, style
from asyncmoe.simulate.sweep import Sweep


def plot(found: Comparison | Sweep, path: Path) -> None:
    """Plot a result. Raises DataError if the file cannot be written."""
    with style():
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        if isinstance(found, Sweep):
            _sweep_figure(found, left, right)
        else:
            _comparison_figure(found, left, right)
        try:
            figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise DataError(str(path), got=error.strerror, expected="a file that can be written") from error


def _comparison_figure(found: Comparison, left: Any, right: Any) -> None:
    modes = list(found.rows)
    bars = left.bar(modes, [row.speedup for row in found.rows.values()], color=BLUE, width=0.6)
    left.bar_label(bars, fmt="%.2fx", padding=2)
    left.axhline(found.s_pools, color=RED, linewidth=1.2, label=f"the law, {found.s_pools:.2f}x")
    left.set_ylim(0, 1.2 * max(found.s_pools, *(row.speedup for row in found.rows.values())))
    left.set_title("Speed-up over sync in the same pools")
    left.legend(loc="upper left")
    for (mode, row), colour in zip(found.rows.items(), (INK, ORANGE, BLUE), strict=False):
        ages = row.outcome.ages
        right.plot(list(ages), [100 * share for share in ages.values()], color=colour, marker="o", markersize=3, label=mode)
    right.set_title("Age of the trained tokens")
    right.set_xlabel("versions")
    right.set_ylabel("share of tokens, %")
    right.legend()


def _sweep_figure(found: Sweep, left: Any, right: Any) -> None:
    etas = sorted({point.max_staleness for point in found.points})
    for index, max_staleness in enumerate(etas):
        points = [point for point in found.points if point.max_staleness == max_staleness]
        gpus = [point.engine_gpus for point in points]
        colour = (PURPLE, ORANGE, GREEN, BLUE)[index % 4]
        left.plot(
            gpus,
            [point.speedup_one_pool for point in points],
            color=colour,
            marker="o",
            markersize=3,
            label=f"max_staleness {max_staleness}",
        )
        right.plot(gpus, [100 * point.trainer_idle for point in points], color=colour, marker="o", markersize=3)
    left.axhline(found.s_max, color=RED, linewidth=1.2, label=f"the law, {found.s_max:.2f}x")
    left.set_title("Speed-up over sync on one pool")
    left.set_ylim(bottom=0)
    left.legend()
    right.set_title("Trainer idle, %")
    right.set_ylim(-2, 100)
    for axes in (left, right):
        axes.axvline(found.law_engine_gpus, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlabel(f"GPUs that generate, of {found.gpus}")
