"""`asyncmoe show`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

from rich.console import Console

from asyncmoe.errors import UserError
from asyncmoe.telemetry.samples import terminal
from asyncmoe.telemetry.samples.as_json import as_json
from asyncmoe.telemetry.samples.colours import COLOURS, Colour
from asyncmoe.telemetry.samples.index import Entry, Index, Outcome, index
from asyncmoe.telemetry.samples.select import SampleQuery, select, summary

DEFAULT_TOKENS = 400


def colour_of(name: str) -> Colour:
    """Return a way to colour tokens. Raises UserError if there is none of that name."""
    if name not in COLOURS:
        raise UserError("--colour", got=name, expected=f"one of {', '.join(COLOURS)}")
    return name


def outcome_of(name: str | None) -> Outcome | None:
    """Return what became of a group. Raises UserError if there is none of that name."""
    if name is not None and name not in get_args(Outcome):
        raise UserError("--outcome", got=name, expected=f"one of {', '.join(get_args(Outcome))}")
    return cast("Outcome | None", name)


def show(run_dir: Path, wanted: SampleQuery, json: bool, colour: Colour, tokens: int | None) -> None:
    """Print samples of a run to standard output.

    Args:
        tokens: shown of a prompt and of a response, 0: all; None: `DEFAULT_TOKENS`, or all in JSON.

    Raises:
        DataError: the run has no samples, or none as wanted.
        UserError: standard output is closed.
    """
    if sys.__stdout__ is None:
        raise UserError("standard output", got="closed", expected="a file, pipe or terminal that takes it")
    found = index(run_dir)
    chosen = select(found, wanted)
    try:
        for entry in chosen if json else ():
            print(as_json(entry.load(), tokens or 0))
        if not json:
            _print(found, chosen, colour, DEFAULT_TOKENS if tokens is None else tokens)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has what it wants, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print(found: Index, chosen: Sequence[Entry], colour: Colour, tokens: int) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(f"{found.run_dir} · {summary(found)}", style="bold")
    for entry in chosen:
        terminal.show(entry.load(), console, colour, tokens)
    if len(chosen) < len(found.entries):
        console.print(f"{len(chosen)} of {len(found.entries)} groups; asyncmoe show --help tells how to choose others", style="dim")
