"""What a user's scorer raises: file, line and traceback."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from asyncmoe import plugins
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.scoring.types import SHOWN

_OWN = str(Path(plugins.__file__).parent)
_FRAMES, _CAUSES = 32, 4
_TRACE_CHARS = 8000


@dataclass(frozen=True)
class Raised:
    """An exception of a user's scorer.

    Attributes:
        at: "FILE:LINE" that raised it; where the scorer is defined, if it could not be called.
        said: type and message.
        trace: the traceback, from the scorer's own code on, without messages; at most `_TRACE_CHARS` characters.
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
    parts, cause = list[str](), cast(BaseException | None, error)
    while cause is not None and len(parts) <= _CAUSES:
        frames = [one for one in traceback.extract_tb(cause.__traceback__) if not one.filename.startswith(_OWN)]
        shown = "".join(traceback.StackSummary.from_list(frames[-_FRAMES:]).format())
        parts.append(f"Traceback of {type(cause).__name__} (most recent call last):\n{shown}")
        cause = cause.__cause__
    at = plugins.raised_at(error) or plugins.place(scorer)
    return Raised(at, plugins.told(error)[:SHOWN], "caused by\n".join(parts)[:_TRACE_CHARS])
