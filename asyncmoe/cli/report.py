"""The command that writes the report of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories, of finished or running runs.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write; default: report.html of the run, or comparison.html of the first.")
    ] = None,
    samples: Annotated[
        bool, typer.Option("--samples/--no-samples", help="Show sampled trajectories; only you can read a file that has some.")
    ] = True,
) -> None:
    """Write report.html and summary.json of a run, finished or still running; of several runs, a page that compares them.

    docs/guides/report.md explains the page.
    """
    from asyncmoe.telemetry.records import read_steps
    from asyncmoe.telemetry.report import command
    from asyncmoe.telemetry.schema import METRICS
    from asyncmoe.telemetry.summary import write_summary

    name = command.REPORT if len(run_dirs) == 1 else command.COMPARISON
    typer.echo(command.write(run_dirs, out or run_dirs[0] / name, samples=samples))
    if len(run_dirs) == 1 and read_steps(run_dirs[0] / METRICS):
        write_summary(run_dirs[0])
