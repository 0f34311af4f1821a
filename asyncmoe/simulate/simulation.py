"""Simulation of one run, event by event.

The live system's own policy decides (`asyncmoe.queue.admission`): groups start when `Admission.may_start` allows it, the trainer leases the
groups with the oldest first-sampled token and drops groups that `Admission.is_stale` reports, and `Ledger` counts every trajectory. The
rest follows the live system, too. Versions are published one at a time, while the next step trains: a trainer that finishes a step before
engines serve the previous version waits. There are no failures.

The engines are in `generating`; scoring, queue, trainer and weight sync are here.
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush

from asyncmoe.errors import InvariantBroken
from asyncmoe.simulate.generating import SimulatedEngines
from asyncmoe.simulate.plant import Mode, Plant
from asyncmoe.simulate.state import Reading, RunState, SimulatedGroup, SimulatedResponse, SimulatedRun, summarise
from asyncmoe.simulate.workload import Workload

QueuedGroup = tuple[float, int, SimulatedGroup]
"""A group's oldest version, its order of arrival, and the group."""


def simulate(plant: Plant, workload: Workload, mode: Mode = "async", skip: int | None = None) -> SimulatedRun:
    """Simulate `plant.steps` training steps.

    Args:
        skip: number of initial steps excluded from the outcome; None: the steps that train the batches started together at the beginning.

    Raises:
        InvariantBroken: a token older than the bound reached the trainer, counts do not add up, or no event is left. Each would be a bug in
            the live system's policy.
    """
    with _without_collector():
        return Simulation(plant, workload, mode, skip).run()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable Python's search for reference cycles, which takes 40 % of the time with 10,000 engines and finds nothing: groups break their
    own cycles at the end."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Simulation:
    """A simulation; see the module. All times are in seconds.

    A method named after an event handles it.
    """

    def __init__(self, plant: Plant, workload: Workload, mode: Mode, skip: int | None = None) -> None:
        self._plant, self._state = plant, RunState(plant, mode)
        self._clock = self._state.clock
        self._engines = SimulatedEngines(self._state, workload.groups(plant.group_size, plant.seed), self._sampled)
        self._unscored: deque[SimulatedGroup] = deque()
        self._scoring = 0
        self._queued: list[QueuedGroup] = []
        self._arrivals = 0
        # Settling: the trainer has finished a step, and leases no batch until engines serve the previous step's version.
        self._training = self._settling = self._publishing = False
        self._free_since = 0.0
        self._warm = min(2 * (self._state.law.max_staleness + 1), plant.steps // 2) if skip is None else skip
        self._since = Reading()

    def run(self) -> SimulatedRun:
        """See `simulate`."""
        state, clock, engines = self._state, self._clock, self._engines
        engines.start_groups()
        while state.steps < self._plant.steps:
            sampled, event = engines.next_event(), clock.next_event()
            if sampled < event:
                clock.now = sampled
                engines.happen()
            elif event < math.inf:
                clock.run_next()
            else:
                raise InvariantBroken(
                    f"simulation: nothing can happen any more at step {state.steps}, version {state.version}: {state.ledger}"
                )
        self._read()
        return summarise(state, self._since, self._warm)

    def _read(self) -> Reading:
        """Bring the totals up to date and return a copy."""
        self._state.now.seconds = self._clock.now
        self._engines.read()
        return replace(self._state.now)

    # ------------------------------------------------------------ scoring: a bounded number of responses at once

    def _sampled(self, response: SimulatedResponse) -> None:
        if not self._plant.scoring.seconds:
            self._scored(response.group)
            return
        self._unscored.append(response.group)
        self._score()

    def _score(self) -> None:
        scoring = self._plant.scoring
        while self._unscored and self._scoring < (scoring.concurrency or math.inf):
            self._scoring += 1
            seconds = scoring.seconds * self._state.rng.lognormvariate(0.0, scoring.sigma)
            self._clock.after(seconds, partial(self._judged, self._unscored.popleft()))

    def _judged(self, group: SimulatedGroup) -> None:
        self._scoring -= 1
        self._scored(group)
        self._score()

    def _scored(self, group: SimulatedGroup) -> None:
        group.left -= 1
        if not group.left:
            self._arrivals += 1
            heappush(self._queued, (group.oldest, self._arrivals, group))
            self._state.ledger = self._state.ledger.accept(self._plant.group_size)
            self._go_on()

    # ------------------------------------------------------------ training on the oldest groups

    def _go_on(self) -> None:
        """In modes that start whole batches, start groups; then begin the next step if possible."""
        if self._state.mode != "async":
            self._engines.start_groups()
        self._lease()

    def _lease(self) -> None:
        """Begin the next step, if the trainer is free and the queue has a batch."""
        state, plant = self._state, self._plant
        if self._training or self._settling or state.steps >= plant.steps:
            return
        if self._drop_stale():
            # Deferred: freed capacity may trigger a lease, and this function is still deciding about one.
            self._clock.after(0.0, self._dropped)
        if state.ledger.queued < plant.batch:
            return
        state.ledger = state.ledger.lease(plant.batch)
        lease = [heappop(self._queued)[2] for _ in range(plant.groups_per_step)]
        self._training = True
        state.now.waiting += self._clock.now - self._free_since
        self._clock.after(plant.trainer.step_s, partial(self._stepped, lease))

    def _drop_stale(self) -> bool:
        """Drop groups that are too old for the next step; return whether there were any."""
        state, stale = self._state, 0
        while self._queued and state.law.is_stale(int(self._queued[0][0]), state.steps):
            heappop(self._queued)[2].end()
            stale += self._plant.group_size
        if stale:
            state.ledger = state.ledger.drop(stale)
        return bool(stale)

    def _dropped(self) -> None:
        self._engines.start_groups()
        self._go_on()

    def _stepped(self, lease: list[SimulatedGroup]) -> None:
        state, self._training = self._state, False
        self._count_ages(lease)
        state.ledger = state.ledger.train(self._plant.batch)
        state.now.training += self._plant.trainer.step_s
        state.steps += 1
        self._free_since = self._clock.now
        if state.steps == self._warm:
            self._since = self._read()
        if self._publishing:
            self._settling = True
            return
        self._publish()
        self._go_on()

    def _count_ages(self, lease: list[SimulatedGroup]) -> None:
        state, step, bound = self._state, self._state.steps, self._state.law.age_bound
        for group in lease:
            age = step - int(group.oldest)
            if age > bound:
                raise InvariantBroken(f"simulation: step {step} trained a token of age {age}, but the law allows at most {bound}")
            state.oldest_age = max(state.oldest_age, age)
            for version, tokens in group.tokens.items():
                state.ages[step - version] += round(tokens)
            state.now.trained_tokens += sum(turn for episode in group.episodes for turn in episode[0])
            group.end()

    # ------------------------------------------------------------ a version travels while engines generate, then they pause for it

    def _publish(self) -> None:
        """Send the weights of the last step."""
        self._publishing = True
        self._clock.after(self._plant.sync.seconds, partial(self._arrived, self._state.steps, self._clock.now))

    def _arrived(self, version: int, began: float) -> None:
        self._clock.pause()
        self._clock.after(self._plant.sync.pause_s, partial(self._served, version, began))

    def _served(self, version: int, began: float) -> None:
        self._clock.resume()
        self._state.version = version
        self._engines.land()
        self._state.now.syncing += self._clock.now - began
        self._publishing = False
        self._engines.start_groups()
        if self._settling:
            self._settling = False
            self._publish()
        self._go_on()
