"""A scorer and a teacher, called concurrently."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from asyncmoe.rollout.scoring.gather_or_cancel import together
from asyncmoe.rollout.scoring.types import Sample, Score, Scorer


class Taught:
    """See `Scorer` and `Teaches`. If scorer or teacher fails, the other call is cancelled.

    Args:
        scorer: None (`scoring.scorer: none`): the reward is 0.
        teacher: supplies `Score.teacher`.
    """

    def __init__(self, scorer: Scorer | None, teacher: Scorer) -> None:
        self.scorer, self.teacher = scorer, teacher

    async def score(self, sample: Sample) -> Score:
        """See `Scorer`."""
        if self.scorer is None:
            return Score(0.0, teacher=await self.teach(sample))
        score, taught = await together([one.score(sample) for one in (self.scorer, self.teacher)])
        return replace(score, teacher=taught.teacher)

    async def teach(self, sample: Sample) -> np.ndarray | None:
        """See `Teaches`."""
        return (await self.teacher.score(sample)).teacher

    async def close(self) -> None:
        """See `Scorer`."""
        await asyncio.gather(*(one.close() for one in (self.scorer, self.teacher) if one is not None))
