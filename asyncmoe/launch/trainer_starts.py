"""Whether a trainer or controller that was lost is started again in place, while all others go on. Decisions only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncmoe.errors import RECURRING

FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 60.0
"""Seconds before the second start after failures in a row, and at most; the first is at once, and each further wait doubles."""


@dataclass(frozen=True)
class StartFailure:
    """How one start of the trainer, or of the controller, ended.

    Attributes:
        why: the root cause, in words.
        exit_code: of the root cause's error.
        step: highest step that was trained since the start; 0: none.
    """

    why: str
    exit_code: int
    step: int


@dataclass(frozen=True)
class Allowance:
    """What a restart needs.

    Attributes:
        max_restarts: failures in a row after which the run goes on; 0: none.
        logged: whether the log has the batches since the checkpoint.
        others: whether the parts that it needs go on.
        stopping: whether the user has asked the run to stop.
        who, key: the part, and the key that sets `max_restarts`, in messages.
    """

    max_restarts: int
    logged: bool
    others: bool
    stopping: bool = False
    who: str = "trainer"
    key: str = "trainer.max_restarts"


@dataclass(frozen=True)
class StartAgain:
    """Start it again after `after_s` seconds. `row`: failures in a row so far."""

    after_s: float
    row: int


@dataclass(frozen=True)
class EndRun:
    """End the run. `why`: what the root cause does not say; empty: nothing."""

    why: str = ""


def decide(history: Sequence[StartFailure], failure: StartFailure, allowance: Allowance) -> StartAgain | EndRun:
    """Decide what follows a failure of the trainer, or of the controller.

    A start that trains no step beyond those of all earlier starts is a failure in a row: it may have trained again what they had.

    Args:
        history: earlier failures of the same part since the run was started, oldest first.
    """
    if failure.exit_code in RECURRING or allowance.stopping or not allowance.others or not allowance.max_restarts:
        return EndRun()
    if not allowance.logged:
        return EndRun(f"the {allowance.who} does not start again without the log (log.enabled)")
    row = in_a_row([*history, failure])
    if row > allowance.max_restarts:
        return EndRun(f"the {allowance.who} was lost {row} times without a new step; {allowance.key} is {allowance.max_restarts}")
    wait_s = 0.0 if row == 1 else FIRST_WAIT_S * 2.0 ** min(row - 2, 30)
    return StartAgain(min(wait_s, LONGEST_WAIT_S), row)


def in_a_row(failures: Sequence[StartFailure]) -> int:
    """Return how many starts, up to the last, have failed since a step was trained that none had trained before; 0 without a failure."""
    row, best = 0, 0
    for failure in failures:
        row = 1 if failure.step > best else row + 1
        best = max(best, failure.step)
    return row
