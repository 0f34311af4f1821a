"""The finding of a check: a line of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncmoe.errors import UserError

State = Literal["ok", "warning", "error", "not here"]
"""error: a run would fail. warning: a run would be slow, or fails under some configurations. not here: nothing to check, which is fine."""


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        hint: what to do about it; None if nothing.
        expected: what was expected, unless `found` says it.
    """

    state: State
    found: str
    hint: str | None = None
    expected: str | None = None

    @property
    def line(self) -> str:
        """What was found, and what was expected."""
        return self.found if self.expected is None else f"{self.found}, expected {self.expected}"


def ok(found: str) -> Finding:
    return Finding("ok", found)


def absent(found: str, hint: str | None = None) -> Finding:
    return Finding("not here", found, hint)


def warning(found: str, hint: str) -> Finding:
    return Finding("warning", found, hint)


def error(found: str, hint: str, expected: str | None = None) -> Finding:
    return Finding("error", found, hint, expected)


def refused(refusal: UserError) -> Finding:
    """Convert an error of the run's own functions."""
    return Finding("error", f"{refusal.what}: {refusal.got}", refusal.hint or "change what is named", str(refusal.expected))
