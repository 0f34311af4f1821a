"""What a user's scorer raises: file, line and traceback."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from asyncmoe import plugins
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.scoring.types import SHOWN

_FRAMES, _TRACE_CHARS = 32, 8000


class ScorerRaised(TrajectoryRejected):
    """A user's scorer raised.

    Attributes:
        at: "FILE:LINE" that raised it; where the scorer is defined, if it could not be called.
        trace: the traceback; at most `_TRACE_CHARS` characters.

    Args:
        said: type and message.
    """

    def __init__(self, reason: str, at: str, said: str, trace: str) -> None:
        self.at, self.trace = at, trace
        super().__init__(reason, f"{said} ({at})")


def raised_by(error: BaseException, scorer: Callable[..., Any]) -> dict[str, str]:
    """Describe an exception that a call of `scorer` raised, by the names of `ScorerRaised`'s arguments."""
    trace = "".join(traceback.format_exception(error, limit=-_FRAMES))
    at = plugins.raised_at(error) or plugins.place(scorer)
    return {"at": at, "said": plugins.told(error)[:SHOWN], "trace": trace[:_TRACE_CHARS]}
