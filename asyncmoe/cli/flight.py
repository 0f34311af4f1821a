"""Commands of the flight recorder: train recorded steps again, fork a run from its records, pack steps for somebody else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncmoe.config_commands import Overrides, RunPath
from asyncmoe.errors import UserError


def replay(
    run_dir: RunPath,
    overrides: Overrides = None,
    step: Annotated[str | None, typer.Option(metavar="A[:B]", help="Steps to train again; default: all that can be.")] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Also check that each token fits the weight version that it was recorded with; slower.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Train nothing: compare the records of the two runs, and show where they part.")
    ] = None,
) -> None:
    """Train recorded steps of a run again, and compare every bit.

    Needs no engines: ranks start on this machine, from the newest checkpoint before step A. The result is "bit-equal", or the first step
    and tensor that differ and the likely reason; then the exit status is 1. Nothing is written to RUN. For example:

        asyncmoe replay runs/demo --step 430:440

        asyncmoe replay runs/big --step 812 trainer.ranks=8 trainer.pp=1

        asyncmoe replay runs/a --against runs/b

    Another layout rounds differently; the output then says by how much losses and weights differ. log.keep sets how many steps can be
    trained again. docs/guides/replay.md explains more.
    """
    from asyncmoe import interrupts
    from asyncmoe.launch import replay as launcher

    if against is not None and (step or overrides or tokens):
        raise UserError("asyncmoe replay --against", got="other options too", expected="only two runs")
    with interrupts.stopping("stopped; the run is unchanged"):
        if against is not None:
            equal = launcher.against(run_dir, against)
        else:
            equal = launcher.replay(run_dir, _steps(step), overrides or (), tokens)
    if not equal:
        raise typer.Exit(1)


def fork(
    run_dir: RunPath,
    at: Annotated[int, typer.Option(min=0, help="Step after which the fork parts from the run.")],
    overrides: Overrides = None,
) -> None:
    """Train the recorded batches of a run with other keys.

    The fork is a run of its own, in run.dir=DIR or RUN-fork-AT. It ends with the recorded batches. For example:

        asyncmoe fork runs/demo --at 420 objective.correction.weight=none run.dir=runs/without

        asyncmoe report runs/demo runs/without
    """
    from asyncmoe import interrupts
    from asyncmoe.launch import replay as launcher

    with interrupts.stopping("stopped; the run is unchanged, and nothing is left of the fork"):
        out = launcher.fork(run_dir, at, overrides or ())
    typer.echo(f"{out}: next, asyncmoe report {run_dir} {out}")


def pack(
    run_dir: RunPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; must not exist.")],
    steps: Annotated[str, typer.Option("--steps", metavar="A:B", help="Steps to pack.")],
) -> None:
    """Pack what a replay of some steps needs, e.g. for a bug report.

    OUT is a run directory for asyncmoe replay and fork. It contains prompts and responses of these steps, but no keys, passwords or paths
    of this machine.
    """
    from asyncmoe.flight import pack as packer

    found = _steps(steps, "--steps")
    assert found is not None
    for line in packer.pack(run_dir, *found, out):
        typer.echo(line)
    typer.echo(f"{out}: next, asyncmoe replay {out}")


def _steps(text: str | None, option: str = "--step") -> tuple[int, int] | None:
    """Parse "A" or "A:B". Raises UserError."""
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not (first.isdecimal() and (last or first).isdecimal() and 0 < int(first) <= int(last or first)):
        raise UserError(option, got=repr(text), expected="A or A:B with 1 <= A <= B")
    return int(first), int(last or first)
