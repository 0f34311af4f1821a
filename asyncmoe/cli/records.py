"""Commands that read what a run recorded, or is doing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from asyncmoe.errors import DataError, UserError


def stacks(run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of a running run.")]) -> None:
    """Show the Python stacks of a run's own processes on this host, e.g. to see where it hangs.

    The run's processes are those that it recorded in its directory. Of a run
    on several hosts, the end of the output names those not covered. To profile
    steps instead, see docs/guides/profiling.md.
    """
    from asyncmoe.launch import stacks as command

    for text in command.stacks(run_dir):
        typer.echo(f"{text}\n")


def show(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, of a finished or running run.")],
    step: Annotated[int | None, typer.Option(help="Groups that this step trained, counted as in metrics.jsonl.")] = None,
    group: Annotated[int | None, typer.Option(help="The group with this number, in all its attempts.")] = None,
    version: Annotated[int | None, typer.Option(help="Groups with a token that this weight version sampled.")] = None,
    outcome: Annotated[
        Literal["trained", "queued", "dropped", "requeued", "rejected", "lost"] | None,
        typer.Option(help="Groups of which this became; lost: in a restart of the run."),
    ] = None,
    worst: Annotated[bool, typer.Option("--worst", help="The lowest mean reward first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="The highest mean reward first.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Number of groups; default: 3, or all of a --step or --group that is named.")
    ] = None,
    colour: Annotated[
        Literal["version", "logprob", "ratio", "mask", "mismatch"], typer.Option("--colour", "--color", help="What colours tokens.")
    ] = "version",
    tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens shown of a prompt and of a response, from both ends; 0: all. Default: 400, or all with --json."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each group, with all its tokens.")] = False,
) -> None:
    """Show trajectories of a run: prompts, responses, tool calls, rewards, and what the trainer made of each token.

    Without options: the groups of the newest step. Each token can be coloured
    by what is known of it:

    - version: the weight version that sampled it

    - logprob: its log-probability in the engine; ratio: trainer to engine

    - mask: trained, clipped, or rejected by the correction

    - mismatch: layers whose router would have sent it elsewhere

    For example:

        asyncmoe show runs/demo --worst --colour ratio

        asyncmoe show runs/demo --outcome rejected

        asyncmoe show runs/demo --step 420 --json | jq .reward

    telemetry.samples says how many groups a run keeps: by default 2 of each
    step's. docs/guides/samples.md explains what is shown.
    """
    from asyncmoe.telemetry.samples import command

    if worst and best:
        raise UserError("asyncmoe show", got="--worst and --best", expected="one of them")
    wanted = command.SampleQuery(step, group, version, outcome, "worst" if worst else "best" if best else "newest", limit)
    command.show(run_dir, wanted, as_json, colour, tokens)


def log_command(run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]) -> None:
    """List the logs of a run and verify the checksum of every record. Changes nothing; the run may be running.

    Ends with status 1 if a record is damaged. docs/log-format.md has the bytes
    of the files.
    """
    from asyncmoe.log import belonging, files
    from asyncmoe.telemetry.report.run_page import settings

    known, told = belonging.read(run_dir), settings(run_dir).get("log.folder", "null")
    folder = run_dir / belonging.FOLDER if told == "null" else Path(told)
    if known is None or known.redis or not folder.is_dir():
        got = f"{run_dir}, whose log is in Redis" if known is not None and known.redis else f"{run_dir}, without one"
        raise DataError("log", got=got, expected="a run whose log is in a folder")
    found = [files.examine(each) for each in sorted(folder.iterdir()) if each.is_dir()]
    for each in found:
        typer.echo(each)
    if any("damaged" in each for each in found):
        raise typer.Exit(1)
