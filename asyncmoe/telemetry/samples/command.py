"""`asyncmoe show`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast, get_args

from rich.console import Console

from asyncmoe.errors import UserError
from asyncmoe.telemetry.run import broken_configuration
from asyncmoe.telemetry.samples import plain, terminal
from asyncmoe.telemetry.samples.colours import COLOURS, Colour
from asyncmoe.telemetry.samples.index import Entry, Index, Outcome, index, load
from asyncmoe.telemetry.samples.select import SampleQuery, select, summary
from asyncmoe.telemetry.samples.visible import visible

Form = Literal["terminal", "plain", "json"]
ON_TERMINAL = 400


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


def show(run_dir: Path, wanted: SampleQuery, form: Form, colour: Colour, tokens: int | None) -> None:
    """Print samples of a run to standard output, and what a reader should know about them to standard error.

    Args:
        tokens: shown of a prompt and of a response, 0: all; None: `ON_TERMINAL` on a terminal, else all.

    Raises:
        DataError: the run has no samples, or none as wanted.
        UserError: standard output is closed.
    """
    if sys.__stdout__ is None:
        raise UserError("standard output", got="closed", expected="a file, pipe or terminal that takes it")
    found = index(run_dir)
    chosen = select(found, wanted)
    console = Console(highlight=False, markup=False, emoji=False)
    for note in (*found.notes, *filter(None, [broken_configuration(run_dir)])):
        print(f"note: {visible(note)}", file=sys.stderr)
    try:
        _print(found, chosen, form, colour, tokens, console)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has what it wants, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print(found: Index, chosen: Sequence[Entry], form: Form, colour: Colour, tokens: int | None, console: Console) -> None:
    if form == "terminal":
        console.print(f"{found.run_dir} · {summary(found)}", style="bold")
    for entry in chosen:
        sample = load(found, entry)
        if form == "terminal":
            terminal.show(sample, console, colour, ON_TERMINAL if tokens is None else tokens)
        else:
            print("\n".join(plain.lines(sample, tokens or 0)) if form == "plain" else plain.as_json(sample))
    if form == "terminal" and len(chosen) < len(found.entries):
        console.print(f"{len(chosen)} of {len(found.entries)} groups; asyncmoe show --help tells how to choose others", style="dim")
