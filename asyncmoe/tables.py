"""Where commands print their tables: a terminal has a width; a file or a pipe has none, and takes whole tables and sentences."""

from __future__ import annotations

import sys

from rich.console import Console

_UNBOUNDED = 1 << 16
"""Columns: more than any table or sentence has."""


def console() -> Console:
    """Return what prints to standard output, in the terminal's width; without a terminal, nothing is wrapped or cut."""
    return Console() if sys.stdout.isatty() else Console(width=_UNBOUNDED)
