"""Groups in progress, and the rounds that they are in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.queue.group_buffer import Group
from asyncmoe.queue.group_state import Gathering
from asyncmoe.queue.rounds import Rounds
from asyncmoe.queue.start_order import Start
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rpc.worker_messages import Made

LOST = "worker_lost"
"""Reason of a rejection: the worker that ran the episode is gone."""


Ended = tuple[EpisodeId, Sequence[Made]]
"""An episode and what it has brought: a trajectory for each agent."""
RoundEnd = Literal["running", "complete", "put_off", "lost", "lost_as_spare"]
"""put_off: the round was over without the group, and the ledger counts it no more. lost_as_spare: a spare group has taken its place."""


class PutOff(Exception):
    """A group is put off."""


class Workers(Protocol):
    """All rollout workers: they run episodes, and hold what these bring."""

    async def episode(self, prompt: Prompt, place: EpisodeId) -> Sequence[Made]:
        """Run and score one episode of training. Raises TrajectoryRejected."""
        ...

    async def evaluate(self, name: str, prompt: Prompt, place: EpisodeId) -> Sequence[Made]:
        """Run and score one episode of an evaluation set. Raises TrajectoryRejected."""
        ...

    async def show(self, first: int, count: int) -> Sequence[Group]:
        """Return demonstrations of the warm-up, `count` from number `first` on: a group of one for each trajectory."""
        ...

    async def pack(self, episodes: Sequence[EpisodeId], newest: int) -> Group:
        """Return the group of these episodes, checked; `newest`: version that may have sampled a token. Raises TrajectoryRejected."""
        ...

    def forget(self, episodes: Sequence[EpisodeId], groups: Sequence[int]) -> None:
        """End and forget the episodes of groups that are given up or start again."""
        ...


@dataclass(eq=False)
class Flight:
    """One group in progress and the tasks of its members.

    Attributes:
        round: number of its round (`Rounds.number`).
        round_end: what became of it in the round.
    """

    group: Start
    prompt: Prompt
    state: Gathering
    round: int = 0
    round_end: RoundEnd = "running"
    restarted: bool = False
    dropped: bool = False
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    places: list[EpisodeId] = field(default_factory=list)
    ended: asyncio.Queue[tuple[EpisodeId, Sequence[Made] | TrajectoryRejected] | None] = field(default_factory=asyncio.Queue)
    """What became of each member; None: the group is put off."""

    @property
    def deferred(self) -> Start:
        """The start of the group after it was put off."""
        return replace(self.group, attempt=self.group.attempt + 1)

    async def stop(self) -> None:
        """Cancel the running members, and wait until they have ended."""
        running = {task for task in self.tasks if not task.done()}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


class FlightRounds:
    """The groups in progress that belong to a round (`asyncmoe.queue.rounds`).

    Attributes:
        now: the current round.
    """

    def __init__(self, rounds: Rounds[Start]) -> None:
        self.now = rounds
        self._running: set[Flight] = set()
        self._moved = asyncio.Event()

    @property
    def are_full(self) -> bool:
        """Whether no group may start before the round is over, or a group has failed."""
        return not self.now.is_off and self.now.is_full

    async def moved(self) -> None:
        """Wait until a group has ended from now on."""
        self._moved.clear()
        await self._moved.wait()

    def add(self, flight: Flight) -> None:
        """Note that a group of the round has started."""
        flight.round = self.now.number
        self._running.add(flight)

    def complete(self, flight: Flight) -> list[Flight]:
        """Note that a group is complete; return the groups that are put off because the round needs no more, in order."""
        self._running.discard(flight)
        flight.round_end = "complete"
        if self.now.is_off:
            return []
        self._moved.set()
        self.now = self.now.complete_one()
        if not self.now.is_over:
            return []
        late = sorted(self._running, key=lambda other: other.group.number)
        self.now = self.now.put_off([other.deferred for other in late])
        for other in late:
            other.round_end = "put_off"
        self._running.clear()
        return late

    def lose(self, flight: Flight) -> bool:
        """Note, at once, that a group will not be queued; return whether a spare one has taken its place. Idempotent."""
        self._running.discard(flight)
        if not self.now.is_off and flight.round == self.now.number and flight.round_end in ("running", "complete"):
            self.now, spared = self.now.lose_one(flight.round_end == "complete")
            flight.round_end = "lost_as_spare" if spared else "lost"
            self._moved.set()
        return flight.round_end == "lost_as_spare"
