"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "error", "not here"]
"""error: a run would fail. warning: a run would be slow, or fails under some configurations. not here: nothing to check, which is fine."""


@dataclass(frozen=True)
class Verdict:
    """State, finding and fix; `cure` is None if no fix is needed."""

    state: State
    found: str
    cure: str | None = None


@dataclass(frozen=True)
class Finding:
    """A line of the report: the verdict of the check `name`."""

    name: str
    state: State
    found: str
    cure: str | None = None


def ok(found: str) -> Verdict:
    return Verdict("ok", found)


def absent(found: str, cure: str | None = None) -> Verdict:
    return Verdict("not here", found, cure)


def warning(found: str, cure: str) -> Verdict:
    return Verdict("warning", found, cure)


def error(found: str, cure: str) -> Verdict:
    return Verdict("error", found, cure)


def size(nbytes: float) -> str:
    """Format bytes in decimal units with three significant digits."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"
