"""One page of all arms: curves with 95 % intervals over the seeds, and a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.learning import figures
from benchmarks.learning.arms import ARMS
from benchmarks.learning.summary import Runs, summary

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
    """Return a row for each arm: seeds, accuracy, samples and seconds to `level`, tokens a second, and what it changes, see `summary`."""
    heads = (
        "arm",
        "what it is",
        "seeds",
        "before",
        "after",
        f"samples to {level:g}",
        f"seconds to {level:g}",
        "tokens/s",
        "mean accuracy, difference",
    )
    rows = ["<tr>" + "".join(f"<th>{head}" for head in heads)]
    for name, told in summary(by_arm, level).items():
        never = f", {told['never']} never" if told["never"] and "samples_to" in told else ""
        first = [_interval(told[axis]) + never if axis in told else "never" for axis in ("samples_to", "seconds_to")]
        against = _interval(told["against"]["curve"]) if "against" in told else ""
        cells = (_interval(told["before"]), _interval(told["after"]), *first, _interval(told["tokens_per_s"]), against)
        about = next(arm.about for arm in ARMS if arm.name == name)
        rows.append(f"<tr><td>{escape(name)}<td>{escape(about)}<td>{told['seeds']}" + "".join(f"<td>{cell}" for cell in cells))
    return f"<table>{''.join(rows)}</table>"


def _interval(told: Sequence[float]) -> str:
    mean, half = told
    return f"{mean:.3g} ± {half:.2g}" if half else f"{mean:.3g}"


def pictures(results: Mapping[str, Any], folder: Path) -> None:
    """Write the figures of the documentation: learning-dense.svg and learning-moe.svg, of the arms there are."""
    runs = figures.by_arm(results["runs"])
    for front, panels in (("dense", figures.DENSE), ("moe", figures.MIXTURE)):
        if drawn := figures.svg({name: those for name, those in runs.items() if name.startswith(front)}, panels):
            (folder / f"learning-{front}.svg").write_text(drawn)
