"""`asyncmoe report`: write the page of a run, or of several runs."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from asyncmoe import installed
from asyncmoe.errors import UserError
from asyncmoe.storage import replace, writing
from asyncmoe.telemetry.report.page import html
from asyncmoe.telemetry.report.run_page import page_of

REPORT, COMPARISON = "report.html", "comparison.html"


def report(*run_dirs: Path, out: Path | None = None, samples: bool = True) -> Path:
    """Write the page of runs atomically from their records so far, and return its path. Works during the runs. Samples are readable only by
    their owner, so a page with samples is, too.

    Args:
        out: the file; None: report.html in the run's directory, or comparison.html in that of the first of several runs.

    Raises:
        DataError: nothing is recorded, or a record is damaged.
        StorageError: the file cannot be written.
        UserError: plotly is not installed, or a path is unsuitable.
    """
    target = out or run_dirs[0] / (REPORT if len(run_dirs) == 1 else COMPARISON)
    for path in run_dirs:
        if not path.is_dir():
            raise UserError("asyncmoe report RUN", got=f"{path}, which is no directory", expected="the run.dir of a run")
    if target.is_dir() or not target.parent.is_dir():
        raise UserError("asyncmoe report --out", got=target, expected="a file in a directory that exists")
    page, groups = page_of(run_dirs, samples)
    title = ", ".join(run.name for run in page.runs)
    text = html(title, msgspec.json.encode(page), [f"[{','.join(each)}]".encode() for each in groups])
    with writing("report of the run", target):
        replace(target, text.encode(), mode=0o600 if any(groups) else 0o666)
    return target


def write_or_explain(run_dir: Path) -> None:
    """Write the report, or explain how to get it if the plot library, which the run itself does not need, is not installed."""
    if installed.has("plotly"):
        report(run_dir)
    else:
        fix = installed.fix("report")
        print(f"{REPORT}: not written without plotly; run: {fix}, then asyncmoe report {run_dir}", file=sys.stderr)
