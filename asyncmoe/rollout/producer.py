"""Produces groups without end: starts them when the capacity law allows, generates them concurrently, and queues them when whole.

The trainer needs whole groups, so a group succeeds or fails as a whole: when one member is rejected, the others are cancelled, and all
started members are counted as rejected with that reason. If the reason was an engine, the group is restarted with the same prompt and a
higher attempt; after any other reason it is dropped, unless the reason is in `start_over` (a response that could not be scored, if the
user wants it restarted). Two settings soften this: spare responses (`oversample`) take the places of rejected responses, and if the
capacity law admits single trajectories (`unit`), a member whose failure would restart its group is restarted alone.

`asyncmoe.queue.start_order` decides what starts next, `asyncmoe.queue.group_state` when a group is whole, and `asyncmoe.queue.rounds` which
groups are put off; this module only carries out their decisions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from asyncmoe.config.queue import Unit
from asyncmoe.errors import AsyncmoeError, TrajectoryRejected
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.group_buffer import Group
from asyncmoe.queue.group_state import Gathering, all_equal
from asyncmoe.queue.queue_log import QueueLog
from asyncmoe.queue.rejections import Rejections
from asyncmoe.queue.rounds import Rounds
from asyncmoe.queue.start_order import Admit, Line, Start
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.flights import Ended, Flight, FlightRounds, PutOff, Workers
from asyncmoe.rollout.samples import Samples
from asyncmoe.rollout.tasks import Task
from asyncmoe.rpc.worker_messages import Made
from asyncmoe.telemetry.samples.records import Fate

log = logging.getLogger(__name__)
Show = Callable[[int, int], Awaitable[Sequence[Group]]]

_ENGINE = frozenset({"engine_died", "engine_error", "engine_timeout"})
_ATTEMPTS = 3
EQUAL = "equal_rewards"
DEFERRED = "deferred"
_SHOWN = 16
"""Demonstrations that a worker is asked for at once."""
_HOPELESS = 64
"""Consecutive rejected groups that end the run."""
_NOTHING_TO_LEARN = 1024
"""Consecutive groups of equal rewards that end the run."""


class Producer:
    """Fills the queue.

    Args:
        workers: run and score episodes, and make groups of them.
        group_size: number of responses to each prompt.
        first_group: number of the first group; the same number asks the same question.
        oversample: number of additional responses to each prompt; the first `group_size` that finish form the group, the others are
            cancelled and counted as dropped under "oversampled". Short responses finish first, so training is biased towards them.
        filter_equal: drop groups whose rewards are all equal, and count them under "equal_rewards".
        unit: unit that the capacity law admits.
        start_over: reasons after which a group is restarted, in addition to engine failures.
        samples: keeps some groups to be read; None: keeps none.
        max_rejected: the run ends if more than this share of the groups is rejected and not restarted; see `Rejections`.
        queue_log: learns what begins and ends; the queue knows which groups it leaves to start (`take_requeued`).
        rounds: has groups start in rounds, of which the slowest are put off; needs `unit` group. None: no rounds.
        most_s: seconds that the limits of the configuration allow an episode; a group in which none ends for longer is named in the log.
    """

    def __init__(
        self,
        queue: BoundedQueue,
        task: Task,
        workers: Workers,
        group_size: int,
        first_group: int = 0,
        *,
        oversample: int = 0,
        filter_equal: bool = False,
        unit: Unit = "group",
        start_over: frozenset[str] = frozenset(),
        samples: Samples | None = None,
        max_rejected: float = 1.0,
        queue_log: QueueLog | None = None,
        rounds: Rounds[Start] | None = None,
        most_s: float | None = None,
    ) -> None:
        self._queue, self._task, self._workers, self._size, self._most_s = queue, task, workers, group_size, most_s
        self._filter_equal, self._samples, self._log = filter_equal, samples, queue_log or QueueLog()
        self._start_over = _ENGINE | start_over
        self._line = Line(first_group, unit, group_size, oversample)
        self._flights: dict[Start, Flight] = {}
        self._rounds = FlightRounds(rounds or Rounds(1))
        self._in_a_row = self._equal_in_a_row = 0
        self._rejections = Rejections(max_rejected)

    async def run(self) -> None:
        """Produce until cancelled.

        Raises:
            AsyncmoeError: no engine is left, too many groups are rejected, or too many consecutive groups have equal rewards.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._wait_can_start()
                    self._line = self._line.again(*self._queue.take_requeued())
                    if self._rounds.now.is_off:
                        self._start_next(tasks)
                    else:
                        self._start_in_round(tasks)
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
        # Raise outside the handler, so that the exception keeps its own cause and context.
        raise first

    async def _wait_can_start(self) -> None:
        """Wait until a group, or a member of one, may start."""
        while True:
            await self._queue.wait_can_start(self._line.places)
            if not self._rounds.are_full:
                return
            await self._rounds.moved()

    def _start_in_round(self, tasks: asyncio.TaskGroup) -> None:
        """Start a group in a place that was returned, or all groups of the next round: each complete one then finds a place."""
        if not self._rounds.now.is_over:
            self._rounds.now = self._rounds.now.start()
            self._start_next(tasks)
            return
        admitted = sum(self._queue.can_start(count * self._size) for count in range(1, self._rounds.now.needed + 1))
        self._rounds.now, again = self._rounds.now.begin(admitted)
        self._line = self._line.first(*again)  # a long round is of these alone
        places, spare = self._rounds.now.places, self._rounds.now.spare
        for number in range(places + spare):
            self._start_next(tasks, has_place=number < places)

    def _start_next(self, tasks: asyncio.TaskGroup, has_place: bool = True) -> None:
        self._line, admit = self._line.take()
        places, spare = (admit.count, admit.spare) if has_place else (0, admit.count + admit.spare)
        self._queue.started(places, spare)
        self._start(admit, tasks)

    def _start(self, admit: Admit, tasks: asyncio.TaskGroup) -> None:
        flight = self._flights.get(admit.group)
        if flight is None:
            self._log.begun(admit.group)
            flight = Flight(admit.group, self._task.prompt(admit.group.number), Gathering(self._size))
            self._flights[admit.group] = flight
            self._rounds.add(flight)
            tasks.create_task(self._group(flight))
        flight.state = flight.state.admit(admit.count, admit.spare)
        for member in admit.members:
            place = EpisodeId(admit.group.number, member, admit.attempt)
            flight.places.append(place)
            flight.tasks.add(tasks.create_task(self._member(flight, place), name=place.key()))

    async def _member(self, flight: Flight, place: EpisodeId) -> None:
        try:
            outcome: Sequence[Made] | TrajectoryRejected = await self._workers.episode(flight.prompt, place)
        except TrajectoryRejected as rejected:
            outcome = rejected
        flight.ended.put_nowait((place, outcome))

    async def _group(self, flight: Flight) -> None:
        try:
            episodes = await self._episodes(flight)
            if flight.round_end == "put_off":
                raise PutOff
            if self._filter_equal and nothing_to_learn([one for _, made in episodes for one in made]):
                self._queue.discarded(self._size, EQUAL, spare=self._rounds.lose(flight))
                self._log.ended(flight.group.number)
                self._drop(flight)
                await self._sample(flight, "dropped", EQUAL)
                self._note_equal()
            else:
                self._complete(flight)
                await self._queue.put(await self._workers.pack([place for place, _ in episodes], self._queue.newest_version))
                await self._sample(flight, "queued")
                self._equal_in_a_row = 0
        except PutOff:
            await self._sample(flight, "dropped", DEFERRED)
        except TrajectoryRejected as rejected:
            self._drop(flight)
            places, spare = flight.state.places, flight.state.spare
            places, spare = (0, places + spare) if self._rounds.lose(flight) else (places, spare)
            self._queue.rejected(places, rejected.reason, spare)
            if not flight.restarted:
                self._log.ended(flight.group.number)
            await self._sample(flight, "rejected", rejected.reason, str(rejected))
            if not (flight.restarted and rejected.reason == "engine_died"):  # one loss can take more groups with it than are hopeless
                self._note(rejected)
            if not flight.restarted:
                self._note_lost(rejected)
        else:
            self._in_a_row = 0
            self._rejections = self._rejections.note("")

    def _complete(self, flight: Flight) -> None:
        """Count a group as complete; if its round needs no more, put off what the round has left, to be sampled again in a later one."""
        for late in self._rounds.complete(flight):
            self._queue.spared(late.state.places + late.state.spare, DEFERRED)
            self._log.again(late.deferred)
            self._drop(late)
            late.ended.put_nowait(None)

    def _restart(self, flight: Flight, attempt: int, rejected: TrajectoryRejected) -> None:
        """Have a group start again that failed in this attempt, unless it has failed too often."""
        group = flight.group
        failures = group.failures + attempt - group.attempt + 1
        self._drop(flight)  # before the next attempt can start
        flight.restarted = failures < _ATTEMPTS
        if flight.restarted:
            again = Start(group.number, attempt + 1, failures)
            self._line = self._line.again(again)
            self._log.again(again)

    def _drop(self, flight: Flight) -> None:
        """Have what holds the episodes forget them, once: the next attempt may have some of the same names."""
        if not flight.dropped:
            self._workers.forget(flight.places, [flight.group.number])
        flight.dropped = True

    async def _sample(self, flight: Flight, fate: Fate, reason: str = "", detail: str = "") -> None:
        if self._samples is not None:
            group, version = flight.group, self._queue.version
            await self._samples.write(group.number, group.attempt, flight.places, flight.prompt, fate, version, reason, detail)

    async def _episodes(self, flight: Flight) -> list[Ended]:
        """Wait until the group is whole; return its episodes in order. Raise TrajectoryRejected if the group fails."""
        finished: list[Ended] = []
        try:
            while not flight.state.whole:
                ended = await self._next(flight)
                if ended is None or flight.round_end == "put_off":
                    raise PutOff
                place, outcome = ended
                if isinstance(outcome, TrajectoryRejected):
                    self._failed(flight, place, outcome)
                else:
                    finished.append((place, outcome))
                    flight.state = flight.state.finish()
        finally:
            del self._flights[flight.group]
            await flight.stop()
        if flight.state.spare and flight.round_end != "put_off":
            self._queue.spared(flight.state.spare)
            flight.state = flight.state.close()
        return sorted(finished, key=lambda ended: ended[0].episode)

    async def _next(self, flight: Flight) -> tuple[EpisodeId, Sequence[Made] | TrajectoryRejected] | None:
        """Return what becomes of the next member of a group to end."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._most_s):
                    return await flight.ended.get()
            late = ", ".join(sorted(task.get_name() for task in flight.tasks if not task.done()))
            log.warning("no episode of group %d has ended for %g s, longer than any may take: %s", flight.group.number, self._most_s, late)

    def _failed(self, flight: Flight, place: EpisodeId, rejected: TrajectoryRejected) -> None:
        """Count a failed member, and restart it or its group if the reason permits. Raise `rejected` if the group fails with it."""
        group = flight.group
        failures = group.failures + place.attempt - group.attempt + 1
        worth_it = rejected.reason in self._start_over and failures < _ATTEMPTS
        flight.state, fate = flight.state.fail(alone=worth_it and self._line.unit == "trajectory")
        if fate == "spared":
            self._queue.rejected(0, rejected.reason, spare=1)
        elif fate == "again":
            self._line = self._line.again_alone(group, place.episode, place.attempt + 1)
            self._queue.rejected(1, rejected.reason)
        else:
            self._line = self._line.forget(group)
            self._rounds.lose(flight)
            if worth_it:
                self._restart(flight, place.attempt, rejected)
            else:
                self._drop(flight)
            raise rejected
        log.warning("a response was rejected for %s", rejected)

    def _note(self, rejected: TrajectoryRejected) -> None:
        self._in_a_row += 1
        if self._in_a_row >= _HOPELESS:
            raise AsyncmoeError(f"the last {_HOPELESS} groups were all rejected, most recently for {rejected}")
        log.warning("a response was rejected for %s", rejected)

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
                f"the last {_NOTHING_TO_LEARN} groups had equal rewards each, and rollout.filter_equal drops those; change "
                "task.difficulty, raise rollout.temperature or rollout.group_size, or set rollout.filter_equal to false"
            )


def nothing_to_learn(trajectories: Sequence[Made]) -> bool:
    """Return True if, for every agent, all rewards within the group are equal."""
    agents = {trajectory.agent for trajectory in trajectories}
    return all(all_equal([t.reward for t in trajectories if t.agent == agent]) for agent in agents)


async def demonstrate(queue: BoundedQueue, show: Show, first: int, total: int, over: Callable[[], bool] = lambda: False) -> None:
    """Fill the warm-up lane with demonstrations `first` to `total` (exclusive), waiting while it is full, until `over` is true.

    Args:
        show: as `asyncmoe.rollout.flights.Workers.show`.
    """
    for index in range(first, total, _SHOWN):
        shown = await show(index, min(_SHOWN, total - index))
        if over():
            return
        await queue.put_demonstrations(shown)
