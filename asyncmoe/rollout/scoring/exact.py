"""The scorer that compares."""

from __future__ import annotations

from asyncmoe.rollout.scoring.types import Sample, Score


class Exact:
    """1 when the response is the answer, up to white space around it, else 0."""

    async def score(self, sample: Sample) -> Score:
        """See `Scorer`."""
        return Score(float(sample.response.strip() == sample.answer))

    async def close(self) -> None:
        """See `Scorer`."""
