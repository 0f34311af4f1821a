"""The warm-up's demonstrations: solved questions of the task, or episodes in which a teacher takes the engines' place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from asyncmoe.errors import DataError
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.episode import Teaching
from asyncmoe.rollout.tasks import Task
from asyncmoe.trajectory import Trajectory

log = logging.getLogger(__name__)
TRIES = 100
"""Questions tried for one demonstration."""


class Demonstrations:
    """The demonstrations of a warm-up, by number.

    A question whose demonstration is too long is replaced by a later question, which the numbers alone choose: a resumed warm-up takes
    the same.

    Args:
        teaching: runs the environment with its teacher; None: the task's own solutions are the demonstrations.
        total: number of demonstrations that the warm-up takes.
        most: tokens that a demonstration may have.
    """

    def __init__(self, task: Task, teaching: Teaching | None, total: int, most: int) -> None:
        self._task, self._teaching, self._total, self._most = task, teaching, total, most
        self._replaced: set[str] = set()

    async def __call__(self, index: int) -> Sequence[Trajectory]:
        """Return the demonstration with this number.

        Raises:
            DataError: `TRIES` questions in a row are too long, or see `Task.demonstration`.
            TrajectoryRejected: see `Teaching.episode`.
        """
        where, size = "", 0
        for question in range(index, index + TRIES * self._total, self._total):
            where, made = await self._demonstration(index, question)
            size = max((len(one.tokens) for one in made), default=0)
            if size <= self._most:
                return made
            self._note(where, size)
            await asyncio.sleep(0)  # long texts take long to encode, and the trainer's requests wait meanwhile
        raise DataError(
            f"demonstration {index} of the warm-up",
            got=f"{TRIES} questions that are too long, the last of them {where} with {size} tokens",
            expected=f"one of at most {self._most}, which the model's context and environment.max_tokens allow",
            hint="leave long rows out by task.filter",
        )

    async def _demonstration(self, index: int, question: int) -> tuple[str, Sequence[Trajectory]]:
        """Return the name of a question, for messages, and its demonstration as that of number `index`."""
        if self._teaching is None:
            made = self._task.demonstration(question)
            return made.where, (episode.demonstration(index, made),)
        prompt = self._task.prompt(question, "demonstration")
        return prompt.where, await self._teaching.episode(index, prompt)

    def _note(self, where: str, size: int) -> None:
        if where not in self._replaced:
            self._replaced.add(where)
            limit = f"the {self._most} that the model's context and environment.max_tokens allow"
            log.warning("%s: a demonstration of %d tokens, more than %s; a later question takes its place", where, size, limit)
