"""The commands of the benchmarks, which only a checkout has."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from asyncmoe.errors import UserError


def commands() -> typer.Typer:
    """Return the commands of the folder `benchmarks` beside this package; an installed wheel does not have it."""
    checkout = Path(__file__).parents[2]
    if (checkout / "benchmarks" / "commands.py").is_file():
        sys.path.insert(0, str(checkout))
        from benchmarks.commands import bench

        return bench
    absent = typer.Typer(help="Run the benchmarks of a checkout.")

    @absent.callback(invoke_without_command=True)
    def refuse() -> None:
        hint = "clone asyncmoe's repository and run asyncmoe bench from its environment"
        raise UserError("benchmarks", got="an installed package", expected="a checkout, which has the folder benchmarks", hint=hint)

    return absent
