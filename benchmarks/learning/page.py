"""One page of all arms: curves with 95 % intervals over the seeds, and a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.learning import figures
from benchmarks.learning.arms import ARMS
from benchmarks.learning.curves import band, reached
from benchmarks.learning.figures import Runs

_STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
body { color: #1f2328; background: #fff }
table { border-collapse: collapse } td, th { padding: .25rem .75rem; border-bottom: 1px solid #d1d9e0; text-align: left }
svg { max-width: 100%; height: auto }"""


def html(results: Mapping[str, Any], level: float) -> str:
    """Return the page.

    Args:
        results: as `runner.read` returns them.
        level: the accuracy whose first time is in the table.
    """
    runs = figures.by_arm(results["runs"])
    groups = [[name for name in runs if name.startswith(front)] for front in ("dense", "moe")]
    shown = [("Dense model", groups[0], (*figures.DENSE, *figures.OTHERS)), ("Mixture", groups[1], (*figures.MIXTURE, *figures.OTHERS))]
    drawn = "\n".join(_section(title, {name: runs[name] for name in names}, panels) for title, names, panels in shown if names)
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Learning</title>'
    about = "Means over seeds, with the 95 % interval of the mean by Student's t. Every arm trains on the same prompts, batches and steps."
    return f"{head}<style>{_STYLE}</style><h1>A real model learns</h1><p>{about}</p>{table(runs, level)}{drawn}</html>\n"


def _section(title: str, runs: Runs, panels: Sequence[figures.Panel]) -> str:
    """Return a heading and its panels, two in a row."""
    rows = [figures.svg(runs, panels[first : first + 2]) for first in range(0, len(panels), 2)]
    return f"<h2>{escape(title)}</h2>" + "\n".join(row[row.index("<svg") :] for row in rows if row)


def table(by_arm: Runs, level: float) -> str:
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


def pictures(results: Mapping[str, Any], folder: Path) -> None:
    """Write the figures of the documentation: learning-dense.svg and learning-moe.svg, of the arms there are."""
    runs = figures.by_arm(results["runs"])
    for front, panels in (("dense", figures.DENSE), ("moe", figures.MIXTURE)):
        if drawn := figures.svg({name: those for name, those in runs.items() if name.startswith(front)}, panels):
            (folder / f"learning-{front}.svg").write_text(drawn)
