"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncmoe.errors import UserError

State = Literal["ok", "warning", "error", "not here"]
"""error: a run would fail. warning: a run would be slow, or fails under some configurations. not here: nothing to check, which is fine."""


@dataclass(frozen=True)
class Verdict:
    """State, what was found, what was expected where `found` does not say it, and what to do about it; `hint` is None where nothing needs
    to be done."""

    state: State
    found: str
    hint: str | None = None
    expected: str | None = None

    @property
    def line(self) -> str:
        """What was found, and what was expected."""
        return self.found if self.expected is None else f"{self.found}, expected {self.expected}"


@dataclass(frozen=True)
class Finding:
    """A line of the report: the verdict of the check `name`."""

    name: str
    state: State
    found: str
    hint: str | None = None


def ok(found: str) -> Verdict:
    return Verdict("ok", found)


def absent(found: str, hint: str | None = None) -> Verdict:
    return Verdict("not here", found, hint)


def warning(found: str, hint: str) -> Verdict:
    return Verdict("warning", found, hint)


def error(found: str, hint: str, expected: str | None = None) -> Verdict:
    return Verdict("error", found, hint, expected)


def refused(refusal: UserError, hint: str = "change what is named") -> Verdict:
    """What a function of the run refuses: its got, its expected, and its hint, or this one where it has none."""
    return Verdict("error", f"{refusal.what}: {refusal.got}", refusal.hint or hint, str(refusal.expected))
