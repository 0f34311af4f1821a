"""The scorers `exact` and `none`."""

from __future__ import annotations

from asyncmoe.rollout.scoring.types import Sample, Score


class Exact:
    """Reward 1 if the response, without surrounding white space, equals the answer, else 0."""

    async def score(self, sample: Sample) -> Score:
        """See `Scorer`."""
        return Score(float(sample.response.strip() == sample.answer))

    async def close(self) -> None:
        """See `Scorer`."""


class Unscored:
    """Reward 0 for every response: a run learns from its teacher only."""

    async def score(self, sample: Sample) -> Score:
        """See `Scorer`."""
        return Score(0.0)

    async def close(self) -> None:
        """See `Scorer`."""
