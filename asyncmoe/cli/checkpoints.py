"""The command that lists, verifies and brings back checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from asyncmoe.errors import UserError


def checkpoints(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory; it may have been moved or copied.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file, and compare it with the digest it was written with.")] = False,
    restore: Annotated[
        str | None, typer.Option(metavar="URL", help="Bring a checkpoint back from the copies that trainer.checkpoint_copy=URL made.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="With --restore: the step; default: the newest that is complete there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each checkpoint.")] = False,
) -> None:
    """List the checkpoints of a run: step, time, size, and the state of each.

    A checkpoint is

    - complete: all files of its manifest are there, in their sizes

    - verified: with --verify, which reads them, at the speed of the disk

    - damaged: the line names the file. A run that resumes takes the one before

    - unfinished: being written now, or left by a save that was killed

    The status is 1 if one is damaged. For example:

        asyncmoe checkpoints runs/demo --verify

        asyncmoe checkpoints runs/demo --restore s3://backups/asyncmoe

        asyncmoe export runs/demo OUT --step 40

    trainer.checkpoint_every, keep_checkpoints and keep_every say which
    checkpoints a run saves and keeps. docs/guides/checkpoints.md explains more.
    """
    from asyncmoe.checkpoints import overview

    if restore is None and step is not None:
        raise UserError("asyncmoe checkpoints", got="--step without --restore", expected="both, or neither")
    if restore is not None:
        from asyncmoe.checkpoints import copies
        from asyncmoe.launch import local

        with local.claim(run_dir):
            typer.echo(f"brought back {copies.restore(restore, run_dir, step)}")
    lines = overview.overview(run_dir, verify=verify)
    for line in lines if as_json else ():
        typer.echo(json.dumps({name: getattr(line, name) for name in ("name", "step", "saved", "nbytes", "state", "fault")}))
    if not as_json:
        typer.echo(overview.table(lines) if lines else f"no checkpoint in {run_dir / 'checkpoints'}")
    if any(line.state == "damaged" for line in lines):
        raise typer.Exit(1)
