"""Output of comparisons and sweeps: tables and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from asyncmoe.errors import DataError
from asyncmoe.simulate.compare import Baseline, Comparison
from asyncmoe.simulate.sweep import Sweep
from asyncmoe.telemetry.format import number, percent


def table(found: Comparison | Sweep, console: Console) -> None:
    """Print a result as a table."""
    batch = f"{found.plant['groups_per_step']} x {found.plant['group_size']}"
    console.print(f"{found.gpus} GPUs, workload {found.workload}, batch {batch}", highlight=False)
    if isinstance(found, Sweep):
        _sweep_table(found, console)
    else:
        _comparison_table(found, console)
    for sentence in found.cautions:
        console.print(f"caution: {sentence}", highlight=False, markup=False)


def write(found: Comparison | Sweep, path: Path) -> None:
    """Write a result as JSON. Raises DataError if the file cannot be written."""
    try:
        path.write_text(json.dumps(asdict(found), indent=1) + "\n")
    except OSError as error:
        raise DataError(str(path), got=error.strerror, expected="a file that can be written") from error


# ---------------------------------------------------------------- tables


def _comparison_table(found: Comparison, console: Console) -> None:
    pools, whole = found.pools, found.one_pool
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
        ("speed-up, same pools", [_gain(r.speedup, o.lost) for r, o in rows]),
        ("of the law there", [percent(r.efficiency) for r, _ in rows]),
        ("speed-up, one pool", [_gain(r.speedup_one_pool, o.lost) for r, o in rows]),
        ("trainer idle", [percent(o.trainer_idle) for _, o in rows]),
        ("engines idle", [percent(o.engine_idle) for _, o in rows]),
        ("engines' rate, of the most", [percent(o.engine_rate) for _, o in rows]),
        ("mean age of a token", [f"{sum(a * s for a, s in o.ages.items()):.2f}" for _, o in rows]),
        ("oldest", [str(o.oldest_age) for _, o in rows]),
        ("dropped", [percent(o.lost) for _, o in rows]),
    ):
        grid.add_row(label, *values)
    console.print(grid)


def _gain(speedup: float, lost: float) -> str:
    return f"{speedup:.2f}x, {percent(lost)} lost" if lost else f"{speedup:.2f}x"


def _line(what: str, base: Baseline) -> str:
    generate, train = base.gpus
    return (
        f"{what} ({generate} GPUs generate, {train} train): generation {base.t_gen:.4g} s, training {base.t_train:.4g} s, weight sync "
        f"{base.t_sync:.3g} s; g {base.g:.3f}, e {base.e:.3f}"
    )


def _sweep_table(found: Sweep, console: Console) -> None:
    console.print(_line("sync, one pool", found.one_pool), highlight=False)
    console.print(f"the law allows {found.s_max:.2f}x, with {found.law_engine_gpus:.0f} GPUs generating", highlight=False)
    grid = Table(show_edge=False, pad_edge=False, collapse_padding=True)
    heads = (
        "engine\nGPUs",
        "trainer\nGPUs",
        "max_\nstaleness",
        "step",
        "one\npool",
        "two\npools",
        "law of\ntwo",
        "train\nidle",
        "age",
        "lost",
    )
    for head in heads:
        grid.add_column(head, justify="right", overflow="fold")
    for p in found.points:
        speedups = (f"{gain:.2f}x" for gain in (p.speedup_one_pool, p.speedup, p.s_pools))
        sizes = (str(size) for size in (p.engine_gpus, p.trainer_gpus, p.max_staleness))
        mark = "bold" if p == found.advised else None
        last = (percent(p.trainer_idle), f"{p.mean_age:.2f}", percent(p.lost))
        grid.add_row(*sizes, number(p.step_s, "s"), *speedups, *last, style=mark)
    console.print(grid)
    for what, p in (("fastest", found.fastest), ("advised: the smallest max_staleness within 3 % of it", found.advised)):
        console.print(
            f"{what}: {p.engine_gpus} engine GPUs, {p.trainer_gpus} trainer GPUs, max_staleness {p.max_staleness}: "
            f"{p.speedup_one_pool:.2f}x over sync on the "
            f"same {found.gpus} GPUs as one pool, {p.speedup:.2f}x over sync in the same two pools; {percent(p.lost)} of what started is "
            "lost",
            highlight=False,
        )
