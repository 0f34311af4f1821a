"""What a user's scorer raises: file, line and traceback."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncmoe import plugins
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.scoring.types import SHOWN

_FRAMES, _TRACE_CHARS = 32, 8000


@dataclass(frozen=True)
class Raised:
    """An exception of a user's scorer.

    Attributes:
        at: "FILE:LINE" that raised it; where the scorer is defined, if it could not be called.
        said: type and message.
        trace: the traceback; at most `_TRACE_CHARS` characters.
    """

    at: str
    said: str
    trace: str


class ScorerRaised(TrajectoryRejected):
    """A user's scorer raised."""

    def __init__(self, reason: str, raised: Raised) -> None:
        self.raised = raised
        super().__init__(reason, f"{raised.said} ({raised.at})")


def raised_by(error: BaseException, scorer: Callable[..., Any]) -> Raised:
    """Describe an exception that a call of `scorer` raised."""
    trace = "".join(traceback.format_exception(error, limit=-_FRAMES))
    return Raised(plugins.raised_at(error) or plugins.place(scorer), plugins.told(error)[:SHOWN], trace[:_TRACE_CHARS])
