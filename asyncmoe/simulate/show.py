"""Tables of comparisons and sweeps."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from asyncmoe.config.devices import counted
from asyncmoe.simulate.compare import Comparison, ModeComparison
from asyncmoe.simulate.sweep import Sweep
from asyncmoe.tables import side_by_side
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
        f"sync: generation {pools.t_gen:.4g} s, {percent(pools.e)} of it with all slots full; training {pools.t_train:.4g} s; "
        f"weight sync {pools.t_sync:.3g} s\n"
        f"at most {pools.s_pools:.2f}x is possible in these pools; {_best(pools.engine_gpus, found.gpus)}",
        highlight=False,
    )
    console.print(side_by_side({f"{mode}, max_staleness {row.outcome.max_staleness}": _mode(row) for mode, row in found.rows.items()}))


def _mode(row: ModeComparison) -> dict[str, str]:
    found = row.outcome
    return {
        "step": number(found.step_s, "s"),
        "speed-up": f"{row.speedup:.2f}x",
        "of the most possible": percent(row.efficiency),
        "trainer idle": percent(found.trainer_idle),
        "engines idle": percent(found.engine_idle),
        "engines' tokens/s, of full slots": percent(found.engine_rate),
        "mean age of a token": f"{found.mean_age:.2f}",
        "oldest": str(found.oldest_age),
        "dropped": percent(found.lost),
    }


def _best(engine_gpus: float, gpus: int) -> str:
    best = min(gpus - 1, max(1, round(engine_gpus)))
    return f"both sides would be equally fast with {counted(best, 'engine GPU')} and {counted(gpus - best, 'trainer GPU')}"


def _sweep_table(found: Sweep, console: Console) -> None:
    console.print(_best(found.law_engine_gpus, found.gpus), highlight=False)
    points = Table(show_edge=False, pad_edge=False, collapse_padding=True)
    heads = "engine\nGPUs", "trainer\nGPUs", "max_\nstaleness", "step", "over\nsync", "at\nmost", "train\nidle", "mean\nage", "lost"
    for head in heads:
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
            f"{what}: {counted(p.engine_gpus, 'engine GPU')}, {counted(p.trainer_gpus, 'trainer GPU')}, "
            f"max_staleness {p.outcome.max_staleness}: a step of "
            f"{number(p.outcome.step_s, 's')}, {p.speedup:.2f}x over sync in the same two pools; {percent(p.outcome.lost)} of what "
            "started is lost",
            highlight=False,
        )
