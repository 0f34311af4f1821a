"""The warm-up's demonstrations: solved questions of the task, or episodes in which a teacher takes the engines' place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from asyncmoe.errors import DataError, TrajectoryRejected
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.episode import Teaching
from asyncmoe.rollout.tasks import Task
from asyncmoe.trajectory import Trajectory

log = logging.getLogger(__name__)
TRIES = 100
"""Maximum number of questions tried for one demonstration."""


class Demonstrations:
    """The demonstrations of a warm-up, by number.

    A question whose demonstration is too long or fails is replaced by a later question. Only the numbers decide by which, so a resumed
    warm-up uses the same questions.

    Args:
        teaching: runs the environment with its teacher; None: the task's own solutions are the demonstrations.
        total: number of demonstrations that the warm-up uses.
        most: maximum tokens of a demonstration.
    """

    def __init__(self, task: Task, teaching: Teaching | None, total: int, most: int) -> None:
        self._task, self._teaching, self._total, self._most = task, teaching, total, most
        self._replaced: set[str] = set()

    async def __call__(self, index: int) -> Sequence[Trajectory]:
        """Return the demonstration with this number.

        Raises:
            DataError: `TRIES` questions in a row are too long or fail; or as `Task.demonstration`.
        """
        why = ""
        for question in range(index, index + TRIES * self._total, self._total):
            where, made = await self._demonstration(index, question)
            if isinstance(made, TrajectoryRejected):
                why = f"{where}: {made}"
            elif (size := max((len(one.tokens) for one in made), default=0)) <= self._most:
                return made
            else:
                why = f"{where}: {size} tokens, more than the {self._most} that the model's context and environment.max_tokens allow"
            if where not in self._replaced:
                self._replaced.add(where)
                log.warning("%s; a later question takes the place of this demonstration", why)
            await asyncio.sleep(0)  # long texts are slow to encode: let the trainer's requests in between
        got, hint = f"{TRIES} questions without a usable demonstration, the last: {why}", "leave long rows out by task.filter"
        raise DataError(f"demonstration {index} of the warm-up", got=got, expected="a question with a demonstration to train on", hint=hint)

    async def _demonstration(self, index: int, question: int) -> tuple[str, Sequence[Trajectory] | TrajectoryRejected]:
        """Return the name of a question, for messages, and its demonstration, numbered `index`, or why there is none."""
        if self._teaching is None:
            made = self._task.demonstration(question)
            return made.where, (episode.demonstration(index, made),)
        prompt = self._task.prompt(question, "demonstration")
        try:
            return prompt.where, await self._teaching.episode(index, prompt)
        except TrajectoryRejected as rejected:
            return prompt.where, rejected
