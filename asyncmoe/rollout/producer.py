"""Groups without end: started when the capacity law allows, generated side by side, queued when whole.

The trainer needs whole groups, so a group stands or falls together: when one member is rejected the others are cancelled, and the
group is counted as rejected under that reason. When an engine was the reason the group is started over, with the same prompt and a
higher attempt; a response that could not be scored would fail again, so its group is left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from asyncmoe.errors import AsyncmoeError, TrajectoryRejected
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.rollout import episode
from asyncmoe.rollout.tasks import Prompt, Task
from asyncmoe.rollout.turns import Place
from asyncmoe.trajectory import Trajectory

log = logging.getLogger(__name__)

Episode = Callable[[Prompt, Place], Awaitable[Trajectory]]
_START_OVER = {"engine_died", "engine_error", "engine_timeout"}
_ATTEMPTS = 3
_HOPELESS = 64
"""Groups rejected one after the other before the run is given up."""


class Producer:
    """Fills the queue.

    Args:
        episode: generates and scores one response.
        group_size: responses to each prompt.
        first_group: number of the first group; the same number asks the same question.
    """

    def __init__(self, queue: BoundedQueue, task: Task, episode: Episode, group_size: int, first_group: int = 0) -> None:
        self._queue, self._task, self._episode, self._size = queue, task, episode, group_size
        self._next = first_group
        self._again: deque[tuple[int, int]] = deque()
        self._seen: set[str] = set()
        self._in_a_row = 0

    async def run(self) -> None:
        """Produce until cancelled.

        Raises:
            AsyncmoeError: no engine is left, or group after group is rejected.
        """
        try:
            async with asyncio.TaskGroup() as groups:
                while True:
                    await self._queue.wait_can_start(self._size)
                    self._queue.started(self._size)
                    groups.create_task(self._group(*self._number()))
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
        # Outside the handler, so that the exception keeps its own cause and context.
        raise first

    def _number(self) -> tuple[int, int]:
        """Group number and attempt of what is to be started now."""
        if self._again:
            return self._again.popleft()
        self._next += 1
        return self._next - 1, 0

    async def _group(self, number: int, attempt: int) -> None:
        try:
            await self._queue.put_group(await self._members(self._task.prompt(number), number, attempt))
        except TrajectoryRejected as rejected:
            self._queue.rejected(self._size, rejected.reason)
            self._note(rejected)
            if rejected.reason in _START_OVER and attempt + 1 < _ATTEMPTS:
                self._again.append((number, attempt + 1))
        else:
            self._in_a_row = 0

    async def _members(self, prompt: Prompt, number: int, attempt: int) -> list[Trajectory]:
        async def member(index: int) -> Trajectory:
            return await self._episode(prompt, Place(number, index, attempt))

        try:
            async with asyncio.TaskGroup() as members:
                tasks = [members.create_task(member(index)) for index in range(self._size)]
        except BaseExceptionGroup as failed:
            # That no engine is left outweighs what it did to one response.
            first = min(failed.exceptions, key=lambda error: isinstance(error, TrajectoryRejected))
        else:
            return [task.result() for task in tasks]
        raise first

    def _note(self, rejected: TrajectoryRejected) -> None:
        self._in_a_row += 1
        if self._in_a_row >= _HOPELESS:
            raise AsyncmoeError(f"the last {_HOPELESS} groups were all rejected, most recently for {rejected}")
        if rejected.reason not in self._seen:
            self._seen.add(rejected.reason)
            log.warning("a group was rejected for %s; more of the kind are only counted", rejected)


async def demonstrate(queue: BoundedQueue, task: Task, first: int, total: int) -> None:
    """Fill the warm-up lane with demonstrations `first` to `total` (exclusive), waiting whenever it is full."""
    for index in range(first, total):
        await queue.put_demonstrations([episode.demonstration(index, task.demonstration(index))])
