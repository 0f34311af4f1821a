"""The interface through which `LimitedScorer` calls functions, worker processes and endpoints."""

from __future__ import annotations

from typing import Protocol

from asyncmoe.rollout.scoring.types import UNAVAILABLE, Sample

_UNREACHABLE = (ConnectionError, TimeoutError)
SHOWN = 500
"""Maximum length of an error message in a rejection, in characters."""


class Judge(Protocol):
    """Computes the raw answer for a sample; called concurrently.

    Attributes:
        width: useful number of concurrent calls; None: unlimited.
    """

    width: int | None

    async def call(self, sample: Sample) -> object:
        """Return the answer, not yet parsed.

        Raises:
            TrajectoryRejected: "scorer_error", "scorer_timeout" (`scoring.timeout_s`), "scorer_unavailable" or "scorer_garbage".
        """
        ...

    async def close(self) -> None:
        """Release connections, processes and the user's object."""
        ...


def reason_of(error: BaseException, otherwise: str) -> str:
    """Map a user's exception to a rejection reason: "scorer_unavailable" for connection errors and timeouts, else `otherwise`."""
    return UNAVAILABLE if isinstance(error, _UNREACHABLE) else otherwise


def said(error: BaseException) -> str:
    """Format an exception as type and message, at most `SHOWN` characters."""
    return f"{type(error).__name__}: {error}"[:SHOWN]
