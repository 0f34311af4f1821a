"""Produce groups endlessly: start them when the capacity law allows, generate them concurrently, and queue them when complete.

The trainer needs whole groups, so a group succeeds or fails as a whole: when one member is rejected, the others are cancelled, and all
started members are counted as rejected with that reason. If an engine was the cause, the group is restarted with the same prompt and a
higher attempt; after any other reason it is dropped, unless the reason is in `start_over` (a response that could not be scored, if the
user wants it restarted).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncmoe.async_tasks import together
from asyncmoe.errors import AsyncmoeError, TrajectoryRejected
from asyncmoe.log.turns import EpisodeId
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.group_buffer import Group
from asyncmoe.queue.records import Start
from asyncmoe.queue.rejections import Rejections
from asyncmoe.rollout.samples import Samples
from asyncmoe.rollout.tasks import Prompt, Task
from asyncmoe.rpc.worker_messages import Made
from asyncmoe.telemetry.samples.records import Fate

log = logging.getLogger(__name__)
Show = Callable[[int, int], Awaitable[Sequence[Group]]]

_ENGINE = frozenset({"engine_died", "engine_error", "engine_timeout"})
_ATTEMPTS = 3
EQUAL = "equal_rewards"
_SHOWN = 16
"""Demonstrations per request to a worker."""
_NOTHING_TO_LEARN = 1024
"""Consecutive groups of equal rewards that end the run."""


class Workers(Protocol):
    """All rollout workers: they run episodes and keep the results."""

    async def episode(self, prompt: Prompt, place: EpisodeId) -> Sequence[Made]:
        """Run and score one episode of training. Raises TrajectoryRejected."""

    async def evaluate(self, name: str, prompt: Prompt, place: EpisodeId) -> Sequence[Made]:
        """Run and score one episode of an evaluation set. Raises TrajectoryRejected."""

    async def pack(self, episodes: Sequence[EpisodeId], newest: int) -> Group:
        """Return the group of these episodes, checked; `newest`: newest version that may have sampled a token. Raises
        TrajectoryRejected."""

    def forget(self, groups: Sequence[int], episodes: Sequence[EpisodeId] = ()) -> None:
        """Forget groups that are over, dropped or restarted, and end these episodes of theirs."""


@dataclass(frozen=True)
class Flight:
    """One group in progress, and its episodes."""

    group: Start
    prompt: Prompt
    places: Sequence[EpisodeId]


class Producer:
    """Fills the queue.

    Args:
        workers: run and score episodes, and make groups of them.
        group_size: number of responses to each prompt.
        filter_equal: drop groups whose rewards are all equal, and count them under "equal_rewards".
        start_over: reasons after which a group is restarted, in addition to engine failures.
        samples: keeps some groups for readers; None: none are kept.
        max_rejected: the run ends if more than this share of the groups is rejected and not restarted; see `Rejections`.
    """

    def __init__(
        self,
        queue: BoundedQueue,
        task: Task,
        workers: Workers,
        group_size: int,
        *,
        filter_equal: bool = False,
        start_over: frozenset[str] = frozenset(),
        samples: Samples | None = None,
        max_rejected: float = 1.0,
    ) -> None:
        self._queue, self._task, self._workers, self._size = queue, task, workers, group_size
        self._filter_equal, self._samples, self._log = filter_equal, samples, queue.log
        self._start_over = _ENGINE | start_over
        self._next, self._again = queue.log.state.next, deque[Start]()
        """The number of the first group never started, and groups to start before it."""
        self._equal_in_a_row = 0
        self._rejections = Rejections(max_rejected)

    async def run(self) -> None:
        """Produce until cancelled.

        Raises:
            AsyncmoeError: no engine is left, too many groups are rejected, or too many consecutive groups have equal rewards.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._queue.wait_can_start(self._size)
                    tasks.create_task(self._group(self._start()))
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
        # Raise outside the handler, so that the exception keeps its own cause and context.
        raise first

    def _start(self) -> Flight:
        self._again += self._queue.take_requeued()
        if self._again:
            group = self._again.popleft()
        else:
            group, self._next = Start(self._next), self._next + 1
        self._queue.started(self._size)
        self._log.starts(group)
        places = [EpisodeId(group.number, member, group.attempt) for member in range(self._size)]
        return Flight(group, self._task.prompt(group.number), places)

    async def _group(self, flight: Flight) -> None:
        try:
            # A failed episode cancels the others.
            episodes = await together([self._workers.episode(flight.prompt, place) for place in flight.places])
            if self._filter_equal and nothing_to_learn([one for made in episodes for one in made]):
                self._queue.ended(self._size, "dropped", EQUAL)
                self._log.ended(flight.group.number)
                self._workers.forget([flight.group.number], flight.places)
                await self._sample(flight, "dropped", EQUAL)
                self._note_equal()
            else:
                await self._queue.put(await self._workers.pack(flight.places, self._queue.newest_version))
                await self._sample(flight, "queued")
                self._equal_in_a_row = 0
        except TrajectoryRejected as rejected:
            self._workers.forget([flight.group.number], flight.places)  # before the next attempt can start
            self._queue.ended(self._size, "rejected", rejected.reason)
            restarted = self._restart(flight.group, rejected)
            await self._sample(flight, "rejected", rejected.reason, str(rejected))
            log.warning("a response was rejected for %s", rejected)
            if not restarted:
                self._note_lost(rejected)
        else:
            self._rejections = self._rejections.note("")

    def _restart(self, group: Start, rejected: TrajectoryRejected) -> bool:
        """Schedule a rejected group's restart if the reason permits and it has not failed too often; return whether it restarts."""
        again = Start(group.number, group.attempt + 1, group.failures + 1)
        if rejected.reason not in self._start_over or again.failures >= _ATTEMPTS:
            self._log.ended(group.number)
            return False
        self._again.append(again)
        self._log.starts(again)
        return True

    async def _sample(self, flight: Flight, fate: Fate, reason: str = "", detail: str = "") -> None:
        if self._samples is not None:
            await self._samples.write(flight.places, flight.prompt, fate, self._queue.version, reason, detail)

    def _note_lost(self, rejected: TrajectoryRejected) -> None:
        self._rejections = self._rejections.note(rejected.reason)
        if self._rejections.exceeded:
            raise AsyncmoeError(
                f"{self._rejections}, more than rollout.max_rejected_share = {self._rejections.limit:g} allows; most recently: {rejected}"
            )

    def _note_equal(self) -> None:
        self._equal_in_a_row += 1
        if self._equal_in_a_row >= _NOTHING_TO_LEARN:
            raise AsyncmoeError(
                f"each of the last {_NOTHING_TO_LEARN} groups had only equal rewards, and rollout.filter_equal drops such groups; change "
                "task.difficulty, raise rollout.temperature or rollout.group_size, or set rollout.filter_equal to false"
            )


def nothing_to_learn(trajectories: Sequence[Made]) -> bool:
    """Return True if, for every agent, all rewards within the group are equal, so every advantage is 0 (DAPO's dynamic sampling, arXiv
    2503.14476, section 3.2)."""
    agents = {trajectory.agent for trajectory in trajectories}
    return all(len({t.reward for t in trajectories if t.agent == agent}) == 1 for agent in agents)


async def demonstrate(queue: BoundedQueue, show: Show, first: int, total: int, over: Callable[[], bool] = lambda: False) -> None:
    """Fill the warm-up lane with demonstrations `first` to `total` (exclusive), waiting while it is full, until `over` is true.

    Args:
        show: as `asyncmoe.rollout.workers.fleet.WorkerFleet.show`.
    """
    for index in range(first, total, _SHOWN):
        shown = await show(index, min(_SHOWN, total - index))
        if over():
            return
        await queue.put_demonstrations(shown)
