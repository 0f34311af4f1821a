"""Tables that commands print, and the file that --json names."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncmoe.errors import DataError

_UNBOUNDED = 1 << 16
"""Width in columns: more than any table or sentence needs."""


def console() -> Console:
    """Return a console on standard output, as wide as the terminal; without a terminal, nothing is wrapped or cut."""
    return Console() if sys.stdout.isatty() else Console(width=_UNBOUNDED)


def grid(first: str, columns: Iterable[str], rows: Iterable[tuple[str, Iterable[str]]]) -> Table:
    """Return a table of named rows of values; `first`: header of the names."""
    table = Table(show_edge=False)
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    for label, values in rows:
        table.add_row(label, *values)
    return table


def side_by_side(columns: Mapping[str, Mapping[str, str]]) -> Table:
    """Return a table with a column for each mapping and a row for each name in them; all have the same names."""
    rows = ((name, [column[name] for column in columns.values()]) for name in next(iter(columns.values())))
    return grid("", columns, rows)


def write_json(values: Mapping[str, Any], file: Path) -> None:
    """Write figures as JSON.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values, indent=1) + "\n")
    except OSError as error:
        raise DataError(str(file), got=error.strerror, expected="a writable file") from error
