"""Tables of comparisons and sweeps."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from asyncmoe.simulate.compare import Comparison
from asyncmoe.simulate.sweep import Sweep
from asyncmoe.tables import grid
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


def _comparison_table(found: Comparison, console: Console) -> None:
    pools = found.pools
    console.print(
        f"sync: generation {pools.t_gen:.4g} s, training {pools.t_train:.4g} s, weight sync {pools.t_sync:.3g} s; "
        f"g {pools.g:.3f}, e {pools.e:.3f}",
        highlight=False,
    )
    console.print(
        f"the law allows {pools.s_pools:.2f}x in these pools; the best split of these GPUs has {pools.engine_gpus:.0f} generate",
        highlight=False,
    )
    modes = [f"{mode}, max_staleness {row.outcome.max_staleness}" for mode, row in found.rows.items()]
    rows = [(row, row.outcome) for row in found.rows.values()]
    lines = [
        ("step", [number(o.step_s, "s") for _, o in rows]),
        ("speed-up", [f"{r.speedup:.2f}x" for r, _ in rows]),
        ("of the law", [percent(r.efficiency) for r, _ in rows]),
        ("trainer idle", [percent(o.trainer_idle) for _, o in rows]),
        ("engines idle", [percent(o.engine_idle) for _, o in rows]),
        ("engines' rate, of the most", [percent(o.engine_rate) for _, o in rows]),
        ("mean age of a token", [f"{o.mean_age:.2f}" for _, o in rows]),
        ("oldest", [str(o.oldest_age) for _, o in rows]),
        ("dropped", [percent(o.lost) for _, o in rows]),
    ]
    console.print(grid("", modes, lines))


def _sweep_table(found: Sweep, console: Console) -> None:
    console.print(f"by the law, {found.law_engine_gpus:.0f} GPUs should generate", highlight=False)
    points = Table(show_edge=False, pad_edge=False, collapse_padding=True)
    for head in ("engine\nGPUs", "trainer\nGPUs", "max_\nstaleness", "step", "over\nsync", "law", "train\nidle", "age", "lost"):
        points.add_column(head, justify="right", overflow="fold")
    for p in found.points:
        o = p.outcome
        sizes = (str(size) for size in (p.engine_gpus, p.trainer_gpus, o.max_staleness))
        speedups = (f"{gain:.2f}x" for gain in (p.speedup, p.s_pools))
        mark = "bold" if p == found.advised else None
        last = (percent(o.trainer_idle), f"{o.mean_age:.2f}", percent(o.lost))
        points.add_row(*sizes, number(o.step_s, "s"), *speedups, *last, style=mark)
    console.print(points)
    for what, p in (("fastest", found.fastest), ("advised: the smallest max_staleness within 3 % of it", found.advised)):
        console.print(
            f"{what}: {p.engine_gpus} engine GPUs, {p.trainer_gpus} trainer GPUs, max_staleness {p.outcome.max_staleness}: a step of "
            f"{number(p.outcome.step_s, 's')}, {p.speedup:.2f}x over sync in the same two pools; {percent(p.outcome.lost)} of what "
            "started is lost",
            highlight=False,
        )
