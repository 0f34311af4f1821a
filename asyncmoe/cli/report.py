"""The command that writes the report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, of a finished or running run.")]) -> None:
    """Write summary.json and report.html of a run, finished or still running."""
    from asyncmoe.telemetry.report import report as write_report
    from asyncmoe.telemetry.run import broken_configuration
    from asyncmoe.telemetry.summary import write_summary

    if (broken := broken_configuration(run_dir)) is not None:
        typer.echo(f"note: {broken}", err=True)
    write_summary(run_dir)
    typer.echo(write_report(run_dir))
