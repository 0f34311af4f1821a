"""What both sides reward: the share of a full answer's places that hold a digit. A random model learns it at any length, and its answers
become full, so that the sizes of a step are the same on both sides."""

from __future__ import annotations

DIGITS = frozenset("0123456789")


def share(response: str, places: int) -> float:
    """Return the share of `places` characters that are digits in a response."""
    return min(sum(one in DIGITS for one in response) / places, 1.0)


class Digits:
    """A scorer, which runs in the controller's event loop.

    Args:
        places: characters of a full answer.
    """

    def __init__(self, places: int) -> None:
        self._places = places

    async def score(self, sample: object) -> float:
        """See `asyncmoe.rollout.scoring`."""
        return share(sample.response, self._places)  # type: ignore[attr-defined]
