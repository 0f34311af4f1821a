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
from asyncmoe.telemetry.report.settings import CONFIG
from asyncmoe.telemetry.samples.records import FOLDER
from asyncmoe.telemetry.schema import METRICS, ROLLOUT

REPORT, COMPARISON = "report.html", "comparison.html"
_RUN = "the run.dir of a run"
_OF_A_RUN = (CONFIG, METRICS, ROLLOUT, FOLDER)


def report(run_dir: Path, *, samples: bool = True) -> Path:
    """Write run_dir/report.html atomically from the records so far. Works during the run.

    Raises:
        DataError: nothing is recorded, or a path is no file.
        StorageError: the file cannot be written.
        UserError: plotly is not installed.
    """
    return write([run_dir], run_dir / REPORT, samples=samples)


def write(run_dirs: Sequence[Path], target: Path, *, samples: bool = True) -> Path:
    """Write the page of runs to `target` atomically. With samples, which only the runs' owner can read, only its owner can read the page.

    Raises:
        DataError, StorageError, UserError: see `report`.
    """
    check(run_dirs)
    if target.is_dir() or not target.parent.is_dir():
        got = f"{target}, which is a directory" if target.is_dir() else f"{target}, in a directory that does not exist"
        raise UserError("asyncmoe report --out", got=got, expected="a file in a directory that exists")
    page, groups = page_of(run_dirs, samples)
    for run_dir, run in zip(run_dirs, page.runs, strict=True):
        for note in run.notes:
            print(f"note: {run_dir / note}", file=sys.stderr)
    title = ", ".join(run.name for run in page.runs)
    packed = [f"[{','.join(each)}]".encode() for each in groups]
    _write(target, html(title, msgspec.json.encode(page), packed), 0o600 if any(groups) else 0o666)
    return target


def write_or_explain(run_dir: Path) -> Path | None:
    """Write the report, or say how to get it where the plot library is not installed: the run itself needs none of it."""
    if installed.has("plotly"):
        return report(run_dir)
    fix = installed.fix("report")
    print(f"{REPORT}: not written without plotly; run: {fix}, then asyncmoe report {run_dir}", file=sys.stderr)
    return None


def check(run_dirs: Sequence[Path]) -> None:
    """Refuse runs that one page cannot show. Raises UserError."""
    seen: dict[Path, Path] = {}
    for path in run_dirs:
        if not path.is_dir():
            raise UserError("asyncmoe report RUN", got=f"{path}, which is no directory", expected=_RUN)
        if any(path.iterdir()) and not any((path / name).exists() for name in _OF_A_RUN):  # an empty one waits for its run
            raise UserError("asyncmoe report RUN", got=f"{path}, which has neither {' nor '.join(_OF_A_RUN)}", expected=_RUN)
        if (first := seen.setdefault(path.resolve(), path)) is not path:
            raise UserError("asyncmoe report", got=f"{first} and {path}, which are the same run", expected="runs that differ")


def _write(target: Path, text: str, mode: int) -> None:
    part = target.with_name(f".{target.name}.{os.getpid()}")
    with writing("report of the run", target):
        part.unlink(missing_ok=True)
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
                file.write(text)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
