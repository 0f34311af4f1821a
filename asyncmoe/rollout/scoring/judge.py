"""What the stage calls: one question, one answer, by one of several ways."""

from __future__ import annotations

from typing import Protocol

from asyncmoe.rollout.scoring.types import UNAVAILABLE, Sample

_UNREACHABLE = (ConnectionError, TimeoutError)
SHOWN = 500
"""Characters of an error's text that are passed on."""


class Judge(Protocol):
    """Someone who scores; called concurrently.

    Attributes:
        width: calls that are of use at the same time; None: as many as one likes.
    """

    width: int | None

    async def call(self, sample: Sample) -> object:
        """Its answer, not yet looked at.

        Raises:
            TrajectoryRejected: "scorer_error", "scorer_timeout" (`scoring.timeout_s`), "scorer_unavailable" or "scorer_garbage".
        """
        ...

    async def close(self) -> None:
        """End what it started."""
        ...


def reason_of(error: BaseException, otherwise: str) -> str:
    """The reason a user's exception stands for: what it needs cannot be reached, or `otherwise`."""
    return UNAVAILABLE if isinstance(error, _UNREACHABLE) else otherwise


def said(error: BaseException) -> str:
    """An exception in one short line."""
    return f"{type(error).__name__}: {error}"[:SHOWN]
