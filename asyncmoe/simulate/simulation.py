"""Simulation of one run, event by event.

The live system's own policy decides (`asyncmoe.queue.admission`): groups start when `Admission.may_start` allows it, the trainer leases the
groups with the oldest first-sampled token and drops groups that `Admission.is_stale` reports, and `Ledger` counts every trajectory. The
rest follows the live system too. Versions are published one at a time, while the next step trains: a trainer that finishes a step before
engines serve the previous version waits for it. A group with a failed response is rejected as a whole; if an engine failure was the cause,
the group starts over with the same episodes, at most twice.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from asyncmoe.errors import InvariantBroken
from asyncmoe.queue.admission import Ledger
from asyncmoe.simulate.fleet import Fleet
from asyncmoe.simulate.plant import Plant
from asyncmoe.simulate.trace import Reading, SimulatedRun, Trace, summarise
from asyncmoe.simulate.workload import Episode, Floats, Workload

_ATTEMPTS = 3


class SimulatedGroup:
    """A group between start and training.

    Attributes:
        left: members not scored yet.
        oldest: version of the group's first sampled token.
        tokens: tokens of complete turns, by version.
        lost: the group has been rejected.
    """

    __slots__ = ("attempt", "episodes", "left", "lost", "members", "oldest", "tokens")

    def __init__(self, episodes: list[Episode], attempt: int) -> None:
        self.episodes, self.attempt = episodes, attempt
        self.members = [SimulatedResponse(self, episode) for episode in episodes]
        self.left, self.lost = len(episodes), False
        self.oldest: float = math.inf
        self.tokens: dict[int, float] = {}


class SimulatedResponse:
    """One response of a group; `version` is the version served when its current turn was sent."""

    __slots__ = ("group", "tools", "turn", "turns", "version")

    def __init__(self, group: SimulatedGroup, episode: Episode) -> None:
        self.group, self.turn, self.version = group, 0, 0
        self.turns, self.tools = episode


def simulate(plant: Plant, workload: Workload, skip: int | None = None) -> SimulatedRun:
    """Simulate `plant.steps` training steps.

    Args:
        skip: number of first steps that the outcome leaves out; None: the steps that train the batches started together at the beginning.

    Raises:
        InvariantBroken: a token older than eta reached the trainer, counts do not add up, or no event is left. Each would be a bug in
            the policy that runs live.
    """
    return Simulation(plant, workload, skip).run()


class Simulation:
    """The state of a simulation; see the module. All times are in seconds; engine time excludes the engines' pauses."""

    def __init__(self, plant: Plant, workload: Workload, skip: int | None = None) -> None:
        self._plant, self._law = plant, plant.admission
        self._size, self._batch = plant.group_size, plant.batch
        self._fleet: Fleet[SimulatedResponse] = Fleet(plant.engines, plant.concurrency, plant.step, plant.prefill_s)
        self._episodes = workload.groups(plant.group_size, plant.seed)
        self._rng = random.Random(plant.seed)
        self._trace, self._ledger = Trace(), Ledger()
        self._now = 0.0
        self._paused_at: float | None = None
        self._paused = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._waiting: deque[SimulatedResponse] = deque()
        self._again: deque[tuple[list[Episode], int]] = deque()
        self._to_score: deque[SimulatedResponse] = deque()
        self._scoring = 0
        self._putting: deque[SimulatedGroup] = deque()
        self._queue: list[tuple[float, int, SimulatedGroup]] = []
        self._arrivals = 0
        self._lease: list[tuple[float, int, SimulatedGroup]] | None = None
        self._trainer_up, self._settling = True, False
        self._free_since = 0.0
        self._version, self._steps = 0, 0
        self._publishing, self._draining = False, False
        self._landing = (0, 0.0)
        self._served_at: list[Floats] = [self._fleet.clocks(0.0)]
        self._warm = min(2 * (self._law.eta + 1), plant.steps // 2) if skip is None else skip
        self._since = Reading()

    def run(self) -> SimulatedRun:
        """See `simulate`."""
        if self._plant.hazards.engine_mtbf_s:
            self._schedule(self._until_engine_fails(), self._engine_fails)
        self._start_groups()
        while self._steps < self._plant.steps:
            self._advance()
        self._read()
        return summarise(self._plant, self._trace, self._since, self._warm, self._ledger)

    # ------------------------------------------------------------ time

    @property
    def _engine_time(self) -> float:
        return (self._now if self._paused_at is None else self._paused_at) - self._paused

    def _schedule(self, seconds: float, what: Callable[[], None]) -> None:
        self._scheduled += 1
        heappush(self._events, (self._now + seconds, self._scheduled, what))

    def _advance(self) -> None:
        finish = self._fleet.next_finish() + self._paused if self._paused_at is None else math.inf
        if self._events and self._events[0][0] <= finish:
            self._now, _, what = heappop(self._events)
            what()
        elif finish < math.inf:
            self._now = finish
            self._sampled(*self._fleet.finish())
        else:
            raise InvariantBroken(f"simulation: nothing can happen any more at step {self._steps}, version {self._version}: {self._ledger}")

    def _varied(self, seconds: float) -> float:
        jitter = self._plant.hazards.jitter
        return seconds * self._rng.lognormvariate(0.0, jitter) if jitter and seconds else seconds

    # ------------------------------------------------------------ generation

    def _start_groups(self) -> None:
        while self._law.may_start(self._ledger, self._size, self._version) and self._batch_may_start():
            self._ledger = self._ledger.start(self._size)
            episodes, attempt = self._again.popleft() if self._again else (next(self._episodes), 0)
            self._waiting.extend(SimulatedGroup(episodes, attempt).members)
        self._place()

    def _batch_may_start(self) -> bool:
        """Return whether a group may start: modes with batches begin a batch only when nothing runs, but replace its lost groups."""
        if self._plant.mode == "async" or not self._ledger.running:
            return True
        alive = self._ledger.accepted + self._ledger.running
        return alive % self._batch != 0

    def _place(self) -> None:
        fleet, waiting = self._fleet, self._waiting
        if self._draining or self._paused_at is not None:
            return
        while waiting and fleet.free:
            member = waiting.popleft()
            group = member.group
            if group.lost:
                continue
            member.version = self._version
            group.oldest = min(group.oldest, self._version)
            fleet.place(member, member.turns[member.turn], self._engine_time)

    def _sampled(self, member: SimulatedResponse, engine: int, start: float, end: float) -> None:
        group, tokens = member.group, member.group.tokens
        for version in range(member.version + 1, self._version + 1):
            landed = float(self._served_at[version][engine])
            tokens[version - 1] = tokens.get(version - 1, 0.0) + landed - start
            start = landed
        tokens[self._version] = tokens.get(self._version, 0.0) + end - start
        member.turn += 1
        if member.turn < len(member.turns):
            self._schedule(member.tools[member.turn - 1], lambda: self._next_turn(member))
        elif not group.lost:
            self._to_score.append(member)
            self._score()
        self._place()
        if self._draining:
            self._drained()

    def _next_turn(self, member: SimulatedResponse) -> None:
        self._waiting.append(member)
        self._place()

    # ------------------------------------------------------------ scoring, and the fate of groups

    def _score(self) -> None:
        plant = self._plant
        while self._to_score and (not plant.score_concurrency or self._scoring < plant.score_concurrency):
            member = self._to_score.popleft()
            if member.group.lost:
                continue
            if not plant.score_s:
                self._judge(member)
                continue
            self._scoring += 1
            seconds = plant.score_s * self._rng.lognormvariate(0.0, plant.score_sigma)
            self._schedule(seconds, lambda member=member: self._scored(member))  # type: ignore[misc]  # binds this iteration's member

    def _scored(self, member: SimulatedResponse) -> None:
        self._scoring -= 1
        if not member.group.lost:
            self._judge(member)
        self._score()

    def _judge(self, member: SimulatedResponse) -> None:
        group, failure = member.group, self._plant.hazards.score_failure
        if failure and self._rng.random() < failure:
            self._reject(group, "not_scored")
            return
        group.left -= 1
        if not group.left:
            self._putting.append(group)
            self._put()

    def _reject(self, group: SimulatedGroup, reason: str) -> None:
        group.lost = True
        for member in group.members:
            self._fleet.cancel(member, self._engine_time)
        self._ledger = self._ledger.reject(self._size)
        self._trace.rejected[reason] += self._size
        if reason == "engine_died" and group.attempt + 1 < _ATTEMPTS:
            self._again.append((group.episodes, group.attempt + 1))
        self._start_groups()
        if self._draining:
            self._drained()

    # ------------------------------------------------------------ the queue

    def _put(self) -> None:
        while self._putting and self._ledger.queued + self._ledger.leased + self._size <= self._plant.capacity:
            group = self._putting.popleft()
            self._arrivals += 1
            heappush(self._queue, (group.oldest, self._arrivals, group))
            self._ledger = self._ledger.accept(self._size)
        if self._plant.mode != "async":
            self._start_groups()
        self._try_lease()

    def _try_lease(self) -> None:
        if self._lease is not None or not self._trainer_up or self._settling or self._steps >= self._plant.steps:
            return
        self._drop_stale()
        if self._ledger.queued < self._batch:
            return
        self._lease = [heappop(self._queue) for _ in range(self._plant.groups)]
        self._ledger = self._ledger.lease(self._batch)
        self._trace.now.waiting += self._now - self._free_since
        seconds = self._varied(self._plant.train_s)
        if self._rng.random() < self._plant.hazards.trainer_failure:
            self._schedule(seconds * self._rng.random(), self._trainer_dies)
        else:
            self._schedule(seconds, lambda: self._trained(seconds))

    def _drop_stale(self) -> None:
        stale = 0
        while self._queue and self._law.is_stale(int(self._queue[0][0]), self._steps):
            heappop(self._queue)
            stale += self._size
        if stale:
            self._ledger = self._ledger.drop(stale)
            self._trace.dropped["stale"] += stale
            # Deferred, because freed places may trigger a lease, and a lease is being decided here.
            self._schedule(0.0, self._room)

    def _room(self) -> None:
        self._start_groups()
        self._put()

    # ------------------------------------------------------------ the trainer

    def _trained(self, seconds: float) -> None:
        lease, self._lease = self._lease, None
        assert lease is not None
        self._count_ages([group for _, _, group in lease])
        self._ledger = self._ledger.train(self._batch)
        self._trace.now.training += seconds
        self._steps += 1
        self._free_since = self._now
        if self._steps == self._warm:
            self._since = self._read()
        if self._publishing:
            self._settling = True
            return
        self._publish()
        self._put()

    def _count_ages(self, groups: list[SimulatedGroup]) -> None:
        trace = self._trace
        for group in groups:
            age = self._steps - int(group.oldest)
            if age > self._law.eta:
                raise InvariantBroken(f"simulation: step {self._steps} trained a token of age {age}, the law allows {self._law.eta}")
            trace.oldest[age] += 1
            for version, tokens in group.tokens.items():
                trace.ages[self._steps - version] += round(tokens)
            trace.now.trained_tokens += sum(turn for episode in group.episodes for turn in episode[0])

    def _trainer_dies(self) -> None:
        lease = self._lease
        assert lease is not None
        for entry in lease:
            heappush(self._queue, entry)
        self._lease, self._trainer_up = None, False
        self._free_since = self._now
        self._ledger = self._ledger.release(self._batch)
        self._trace.releases += 1
        self._schedule(self._plant.hazards.trainer_restart_s, self._trainer_returns)

    def _trainer_returns(self) -> None:
        self._trainer_up = True
        self._try_lease()

    # ------------------------------------------------------------ weight sync

    def _publish(self) -> None:
        version, began = self._steps, self._now
        self._publishing = True
        self._schedule(self._varied(self._plant.sync_s), lambda: self._land(version, began))

    def _land(self, version: int, began: float) -> None:
        self._landing = version, began
        if self._plant.landing == "drain":
            self._draining = True
            self._drained()
        else:
            self._pause()

    def _drained(self) -> None:
        if self._paused_at is None and not self._fleet.in_flight:
            self._pause()

    def _pause(self) -> None:
        self._paused_at = self._now
        self._schedule(self._varied(self._plant.pause_s), self._served)

    def _served(self) -> None:
        assert self._paused_at is not None
        self._paused += self._now - self._paused_at
        self._paused_at = None
        version, began = self._landing
        self._version = version
        self._served_at.append(self._fleet.clocks(self._engine_time))
        self._trace.now.syncing += self._now - began
        self._publishing = self._draining = False
        self._start_groups()
        if self._settling:
            self._settling = False
            self._publish()
        self._put()

    # ------------------------------------------------------------ engines that fail

    def _until_engine_fails(self) -> float:
        return self._rng.expovariate(self._plant.engines / self._plant.hazards.engine_mtbf_s)

    def _engine_fails(self) -> None:
        engine = self._rng.randrange(self._plant.engines)
        if self._fleet.serves(engine):
            groups = {id(member.group): member.group for member in self._fleet.kill(engine, self._engine_time)}
            self._schedule(self._plant.hazards.engine_restart_s, lambda: self._engine_returns(engine))
            for group in groups.values():
                self._reject(group, "engine_died")
            if self._draining:
                self._drained()
        self._schedule(self._until_engine_fails(), self._engine_fails)

    def _engine_returns(self, engine: int) -> None:
        self._fleet.restore(engine, self._engine_time)
        self._place()

    # ------------------------------------------------------------ accounts

    def _read(self) -> Reading:
        """Bring the totals up to date and return a copy."""
        self._fleet.settle(self._engine_time)
        now = self._trace.now
        now.seconds, now.busy, now.sampled = self._now, self._fleet.busy, self._fleet.tokens
        return Reading(**vars(now))
