"""Output of comparisons and sweeps: tables, JSON and plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from asyncmoe.errors import ConfigError, DataError
from asyncmoe.simulate.compare import Baseline, Comparison
from asyncmoe.simulate.sweep import Sweep
from asyncmoe.telemetry.figures import BLUE, GREEN, INK, ORANGE, PURPLE, RED, style
from asyncmoe.telemetry.format import number, percent

_FORMATS = (".svg", ".png")


def check_plot(path: Path | None) -> None:
    """Raise ConfigError unless `path` has a suffix that can be plotted to."""
    if path is not None and path.suffix not in _FORMATS:
        raise ConfigError("--plot", got=str(path), expected=f"a file that ends in {' or '.join(_FORMATS)}")


def table(found: Comparison | Sweep, console: Console) -> None:
    """Print a result as a table."""
    if isinstance(found, Sweep):
        _sweep_table(found, console)
    else:
        _comparison_table(found, console)


def write(found: Comparison | Sweep, path: Path) -> None:
    """Write a result as JSON. Raises DataError if the file cannot be written."""
    try:
        path.write_text(json.dumps(found.as_json(), indent=1) + "\n")
    except OSError as error:
        raise DataError(str(path), got=error.strerror, expected="a file that can be written") from error


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


# ---------------------------------------------------------------- tables


def _comparison_table(found: Comparison, console: Console) -> None:
    pools, whole = found.pools, found.one_pool
    console.print(
        f"{found.gpus} GPUs, workload {found.workload}, batch {found.plant['groups_per_step']} x {found.plant['group_size']}",
        highlight=False,
    )
    console.print(_line("sync, these pools", pools), highlight=False)
    console.print(_line("sync, one pool", whole), highlight=False)
    console.print(
        f"the laws allow {found.s_pools:.2f}x in these pools, {found.s_max:.2f}x on one pool with {found.best_engine_gpus} GPUs generating",
        highlight=False,
    )
    grid = Table(show_edge=False)
    grid.add_column("", no_wrap=True)
    for mode, row in found.rows.items():
        grid.add_column(f"{mode}, max_staleness {row.outcome.max_staleness}", justify="right")
    rows = [(row, row.outcome) for row in found.rows.values()]
    for label, values in (
        ("step", [number(o.step_s, "s") for _, o in rows]),
        ("speed-up, same pools", [f"{r.speedup:.2f}x" for r, _ in rows]),
        ("of the law there", [percent(r.efficiency) for r, _ in rows]),
        ("speed-up, one pool", [f"{r.speedup_one_pool:.2f}x" for r, _ in rows]),
        ("trainer idle", [percent(o.trainer_idle) for _, o in rows]),
        ("engines idle", [percent(o.engine_idle) for _, o in rows]),
        ("engines' rate, of the most", [percent(o.engine_rate) for _, o in rows]),
        ("mean age of a token", [f"{sum(a * s for a, s in o.ages.items()):.2f}" for _, o in rows]),
        ("oldest", [str(o.oldest_age) for _, o in rows]),
        ("trained", [f"{o.ledger['trained']:,}" for _, o in rows]),
        ("dropped or rejected", [percent(o.lost) for _, o in rows]),
        ("simulated time", [number(o.wall, "s") for _, o in rows]),
    ):
        grid.add_row(label, *values)
    console.print(grid)


def _line(what: str, base: Baseline) -> str:
    generate, train = base.gpus
    return (
        f"{what} ({generate} GPUs generate, {train} train): generation {base.t_gen:.4g} s, training {base.t_train:.4g} s, weight sync "
        f"{base.t_sync:.3g} s; g {base.g:.3f}, e {base.e:.3f}"
    )


def _sweep_table(found: Sweep, console: Console) -> None:
    console.print(
        f"{found.gpus} GPUs, workload {found.workload}, batch {found.plant['groups_per_step']} x {found.plant['group_size']}",
        highlight=False,
    )
    console.print(_line("sync, one pool", found.one_pool), highlight=False)
    console.print(f"the law allows {found.s_max:.2f}x, with {found.law_engine_gpus:.0f} GPUs generating", highlight=False)
    grid = Table(show_edge=False)
    heads = (
        "engine\nGPUs",
        "trainer\nGPUs",
        "max_staleness",
        "step",
        "one\npool",
        "two\npools",
        "law of\ntwo",
        "train\nidle",
        "age",
        "lost",
    )
    for head in heads:
        grid.add_column(head, justify="right", no_wrap=True)
    for p in found.points:
        mark = "bold" if p == found.advised else None
        grid.add_row(
            str(p.engine_gpus),
            str(p.trainer_gpus),
            str(p.max_staleness),
            number(p.step_s, "s"),
            f"{p.speedup_one_pool:.2f}x",
            f"{p.speedup:.2f}x",
            f"{p.s_pools:.2f}x",
            percent(p.trainer_idle),
            f"{p.mean_age:.2f}",
            percent(p.lost),
            style=mark,
        )
    console.print(grid)
    for what, p in (("fastest", found.fastest), ("advised: the smallest max_staleness within 3 % of it", found.advised)):
        console.print(
            f"{what}: {p.engine_gpus} engine GPUs, {p.trainer_gpus} trainer GPUs, max_staleness {p.max_staleness}: "
            f"{p.speedup_one_pool:.2f}x over sync on the "
            f"same {found.gpus} GPUs as one pool, {p.speedup:.2f}x over sync in the same two pools",
            highlight=False,
        )


# ---------------------------------------------------------------- figures


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
