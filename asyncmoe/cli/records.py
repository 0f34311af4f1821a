"""Commands that read a run's records and checkpoints, or show what it is doing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from asyncmoe.config_commands import RunPath
from asyncmoe.errors import DataError, UserError

_Lines = Annotated[bool, typer.Option("--json", help="Print complete JSON, one entry per line.")]


def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Directories of finished or running runs.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write; default: report.html in RUN, or comparison.html in the first RUN.")
    ] = None,
    samples: Annotated[
        bool, typer.Option("--samples/--no-samples", help="Include sampled trajectories; only you can read the file then.")
    ] = True,
) -> None:
    """Write the report of a run, or a page that compares several.

    A run may be finished or still running. Its summary.json is also written.
    docs/guides/report.md explains the page.
    """
    from asyncmoe.telemetry.records import read_steps
    from asyncmoe.telemetry.report import command
    from asyncmoe.telemetry.schema import METRICS
    from asyncmoe.telemetry.summary import write_summary

    typer.echo(command.report(*run_dirs, out=out, samples=samples))
    if len(run_dirs) == 1 and read_steps(run_dirs[0] / METRICS):
        write_summary(run_dirs[0])


def checkpoints(
    run_dir: RunPath,
    verify: Annotated[bool, typer.Option("--verify", help="Read every file, and compare it with the digest in its manifest.")] = False,
    restore: Annotated[
        str | None, typer.Option(metavar="URL", help="Restore a checkpoint from the copies that trainer.checkpoint_copy=URL made.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="With --restore: step to restore; default: the newest complete copy.")] = None,
    as_json: _Lines = False,
) -> None:
    """List the checkpoints of a run: step, time, size, state.

    A checkpoint is

    - complete: all files of its manifest are there, with the right sizes

    - verified: --verify has read every file and found no damage

    - damaged: the line names the file. A resumed run uses an older checkpoint

    - unfinished: being written now, or left by a save that was killed

    The exit status is 1 if a checkpoint is damaged. For example:

        asyncmoe checkpoints runs/demo --verify

        asyncmoe checkpoints runs/demo --restore s3://backups/asyncmoe

        asyncmoe export runs/demo OUT --step 40

    trainer.checkpoint_every, keep_checkpoints and keep_every, and log.keep set which checkpoints a run saves and keeps.
    docs/guides/checkpoints.md explains more.
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


def stacks(run_dir: RunPath) -> None:
    """Show the Python stacks of a run, e.g. to see where it hangs.

    The stacks are those of the run's processes on this host. The end of the
    output names the run's other hosts. To profile steps instead, see
    docs/guides/profiling.md.
    """
    from asyncmoe.launch import stacks as command

    for text in command.stacks(run_dir):
        typer.echo(f"{text}\n")


def show(
    run_dir: RunPath,
    step: Annotated[int | None, typer.Option(help="Groups trained in this step of metrics.jsonl.")] = None,
    group: Annotated[int | None, typer.Option(help="All attempts at the group with this number.")] = None,
    version: Annotated[int | None, typer.Option(help="Groups with a token sampled by this weight version.")] = None,
    outcome: Annotated[
        Literal["trained", "queued", "dropped", "requeued", "rejected", "lost"] | None,
        typer.Option(help="Groups with this outcome; lost: the training was undone when the run resumed."),
    ] = None,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest mean reward first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Highest mean reward first.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of groups; default: 3, or all of a given --step or --group.")] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens shown from both ends of a prompt or response; 0: all. Default: 400, or all with --json."),
    ] = None,
    as_json: _Lines = False,
) -> None:
    """Show trajectories of a run: texts, rewards, token values.

    Without options: the groups of the newest step. The colour of a token is the weight version that sampled it; the report's samples can
    be coloured by other properties. For example:

        asyncmoe show runs/demo --worst

        asyncmoe show runs/demo --outcome rejected

        asyncmoe show runs/demo --step 420 --json | jq .reward

    telemetry.samples sets how many of each step's groups a run keeps: by default 2. docs/guides/samples.md explains what is shown.
    """
    from asyncmoe.telemetry.samples import command

    if worst and best:
        raise UserError("asyncmoe show", got="--worst and --best", expected="only one of the two")
    wanted = command.SampleQuery(step, group, version, outcome, "worst" if worst else "best" if best else "newest", limit)
    command.show(run_dir, wanted, as_json, tokens)


def log(run_dir: RunPath) -> None:
    """Verify the logs of a run, and say which steps can be replayed.

    The command changes nothing, so the run may still be running. The exit status is 1 if a record is damaged. docs/log-format.md describes
    the file format.
    """
    from asyncmoe.flight.source import described
    from asyncmoe.log import belonging, files

    known = belonging.read(run_dir)
    if known is None or known.redis or not known.where(run_dir).is_dir():
        got = f"{run_dir}, whose log is in Redis" if known is not None and known.redis else f"{run_dir}, which has no log"
        raise DataError("log", got=got, expected="a run whose log is in a folder")
    found = [files.examine(each) for each in sorted(known.where(run_dir).iterdir()) if each.is_dir()]
    for each in found:
        typer.echo(each)
    typer.echo(described(run_dir))
    if any("damaged" in each for each in found):
        raise typer.Exit(1)
