"""What follows the engines of a simulation: the scorer, the queue, the trainer and the weight sync."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from asyncmoe.errors import InvariantBroken
from asyncmoe.simulate.generating import SimulatedEngines
from asyncmoe.simulate.state import RunState, SimulatedGroup, SimulatedResponse

QueuedGroup = tuple[float, int, SimulatedGroup]
"""Oldest version, arrival, group."""


class SimulatedQueue:
    """Complete groups between scorer and trainer, oldest first; stale ones are dropped. The capacity law bounds their number."""

    def __init__(self, state: RunState) -> None:
        self._state, self._size, self._batch = state, state.plant.group_size, state.plant.batch
        self._queued: list[QueuedGroup] = []
        self._arrivals = 0

    def put(self, group: SimulatedGroup) -> None:
        """Add a group."""
        self._arrivals += 1
        heappush(self._queued, (group.oldest, self._arrivals, group))
        self._state.ledger = self._state.ledger.accept(self._size)

    def drop_stale(self) -> bool:
        """Drop groups that are too old for the next step; True if there were any."""
        state, stale = self._state, 0
        while self._queued and state.law.is_stale(int(self._queued[0][0]), state.steps):
            heappop(self._queued)[2].end()
            stale += self._size
        if stale:
            state.ledger = state.ledger.drop(stale)
        return bool(stale)

    def lease(self) -> list[QueuedGroup] | None:
        """Return the oldest groups, a batch of them; None if fewer are queued."""
        if self._state.ledger.queued < self._batch:
            return None
        self._state.ledger = self._state.ledger.lease(self._batch)
        return [heappop(self._queued) for _ in range(self._state.plant.groups_per_step)]


class SimulatedScorer:
    """The scoring of responses: a bounded number at once.

    Args:
        scored: receives a group whose responses are all scored.
    """

    def __init__(self, state: RunState, scored: Callable[[SimulatedGroup], None]) -> None:
        self._state, self._hand_over = state, scored
        scoring = state.plant.scoring
        self._seconds, self._sigma = scoring.seconds, scoring.sigma
        self._most = math.inf if scoring.concurrency is None else scoring.concurrency
        self._waiting: deque[SimulatedResponse] = deque()
        self._running = 0

    def add(self, response: SimulatedResponse) -> None:
        """Score a complete response, as soon as fewer than the plant's maximum are being scored."""
        if not self._seconds:
            self._scored(response.group)
            return
        self._waiting.append(response)
        self._start()

    def _start(self) -> None:
        while self._waiting and self._running < self._most:
            response = self._waiting.popleft()
            self._running += 1
            seconds = self._seconds * self._state.rng.lognormvariate(0.0, self._sigma)
            self._state.clock.after(seconds, lambda group=response.group: self._finish(group))  # type: ignore[misc]  # this iteration's

    def _finish(self, group: SimulatedGroup) -> None:
        self._running -= 1
        self._scored(group)
        self._start()

    def _scored(self, group: SimulatedGroup) -> None:
        group.left -= 1
        if not group.left:
            self._hand_over(group)


class SimulatedTrainer:
    """The training pool: leases a batch, trains on it, counts the ages of its tokens.

    Args:
        stepped: called after every step.
        dropped: called soon after stale groups were dropped, which leaves places and space.

    Attributes:
        settling: set while the trainer has finished a step and the version of the step before is not served yet; it leases nothing then.
    """

    def __init__(self, state: RunState, queue: SimulatedQueue, stepped: Callable[[], None], dropped: Callable[[], None]) -> None:
        self._state, self._clock, self._queue = state, state.clock, queue
        self._stepped, self._dropped = stepped, dropped
        self._training = self.settling = False
        self._free_since = 0.0

    def try_lease(self) -> None:
        """Begin the next step, if the trainer is free and the queue has a batch."""
        state, plant = self._state, self._state.plant
        if self._training or self.settling or state.steps >= plant.steps:
            return
        if self._queue.drop_stale():
            # Deferred, because freed places may trigger a lease, and a lease is being decided here.
            self._clock.after(0.0, self._dropped)
        lease = self._queue.lease()
        if lease is None:
            return
        self._training = True
        state.now.waiting += self._clock.now - self._free_since
        self._clock.after(plant.trainer.step_s, lambda: self._finish(lease))

    def _finish(self, lease: list[QueuedGroup]) -> None:
        state, self._training = self._state, False
        self._count_ages(lease)
        state.ledger = state.ledger.train(state.plant.batch)
        state.now.training += state.plant.trainer.step_s
        state.steps += 1
        self._free_since = self._clock.now
        self._stepped()

    def _count_ages(self, lease: list[QueuedGroup]) -> None:
        state, step, bound = self._state, self._state.steps, self._state.law.age_bound
        for _, _, group in lease:
            age = step - int(group.oldest)
            if age > bound:
                raise InvariantBroken(f"simulation: step {step} trained a token of age {age}, the law allows {bound}")
            state.oldest_age = max(state.oldest_age, age)
            for version, tokens in group.tokens.items():
                state.ages[step - version] += round(tokens)
            state.now.trained_tokens += sum(turn for episode in group.episodes for turn in episode[0])
            group.end()


class SimulatedSync:
    """The transfer of one version at a time: it travels while engines generate, then they pause for it.

    Args:
        served: called when the engines serve the version.

    Attributes:
        publishing: True from `publish` until the engines serve the version.
    """

    def __init__(self, state: RunState, engines: SimulatedEngines, served: Callable[[], None]) -> None:
        self._state, self._clock, self._engines, self._served = state, state.clock, engines, served
        self.publishing = False

    def publish(self) -> None:
        """Send the weights of the last step."""
        version, began = self._state.steps, self._clock.now
        self.publishing = True
        self._clock.after(self._state.plant.sync.seconds, lambda: self._land(version, began))

    def _land(self, version: int, began: float) -> None:
        self._clock.pause()
        self._clock.after(self._state.plant.sync.pause_s, lambda: self._serve(version, began))

    def _serve(self, version: int, began: float) -> None:
        self._clock.resume()
        self._state.version = version
        self._engines.land()
        self._state.now.syncing += self._clock.now - began
        self.publishing = False
        self._served()
