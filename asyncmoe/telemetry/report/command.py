"""`asyncmoe report`: write the page of a run, or of several runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncmoe import installed
from asyncmoe.errors import UserError
from asyncmoe.storage import writing
from asyncmoe.telemetry.report.page import html
from asyncmoe.telemetry.report.run_page import page_of

REPORT, COMPARISON = "report.html", "comparison.html"


def report(run_dir: Path, *, samples: bool = True) -> Path:
    """Write run_dir/report.html atomically from the records so far. Works during the run.

    Raises:
        DataError: nothing is recorded, or a record is damaged.
        StorageError: the file cannot be written.
        UserError: plotly is not installed.
    """
    return write([run_dir], run_dir / REPORT, samples=samples)


def write(run_dirs: Sequence[Path], target: Path, *, samples: bool = True) -> Path:
    """Write the page of runs to `target` atomically. With samples, which only the runs' owner can read, only its owner can read the page.

    Raises:
        DataError, StorageError, UserError: see `report`.
    """
    for path in run_dirs:
        if not path.is_dir():
            raise UserError("asyncmoe report RUN", got=f"{path}, which is no directory", expected="the run.dir of a run")
    if target.is_dir() or not target.parent.is_dir():
        raise UserError("asyncmoe report --out", got=target, expected="a file in a directory that exists")
    page, groups = page_of(run_dirs, samples)
    title = ", ".join(run.name for run in page.runs)
    text = html(title, msgspec.json.encode(page), [f"[{','.join(each)}]".encode() for each in groups])
    part = target.with_name(f".{target.name}.{os.getpid()}")
    with writing("report of the run", target):
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT, 0o600 if any(groups) else 0o666), "w", encoding="utf-8") as file:
                file.write(text)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    return target


def write_or_explain(run_dir: Path) -> Path | None:
    """Write the report, or say how to get it where the plot library is not installed: the run itself needs none of it."""
    if installed.has("plotly"):
        return report(run_dir)
    fix = installed.fix("report")
    print(f"{REPORT}: not written without plotly; run: {fix}, then asyncmoe report {run_dir}", file=sys.stderr)
    return None
