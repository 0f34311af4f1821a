"""Simulation of one run, event by event.

The live system's own policy decides (`asyncmoe.queue.admission`): groups start when `Admission.may_start` allows it, the trainer leases the
groups with the oldest first-sampled token and drops groups that `Admission.is_stale` reports, and `Ledger` counts every trajectory. The
rest follows the live system too. Versions are published one at a time, while the next step trains: a trainer that finishes a step before
engines serve the previous version waits for it. Nothing fails.

The actors are in `generating` and `training`. This file connects them: what follows when one has acted.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from asyncmoe.errors import InvariantBroken
from asyncmoe.simulate.generating import SimulatedEngines
from asyncmoe.simulate.plant import Mode, Plant
from asyncmoe.simulate.state import Reading, RunState, SimulatedGroup
from asyncmoe.simulate.trace import SimulatedRun, summarise
from asyncmoe.simulate.training import SimulatedQueue, SimulatedScorer, SimulatedSync, SimulatedTrainer
from asyncmoe.simulate.workload import Workload


def simulate(plant: Plant, workload: Workload, mode: Mode = "async", skip: int | None = None) -> SimulatedRun:
    """Simulate `plant.steps` training steps.

    Args:
        skip: number of first steps that the outcome leaves out; None: the steps that train the batches started together at the beginning.

    Raises:
        InvariantBroken: a token older than the bound reached the trainer, counts do not add up, or no event is left. Each would be a bug
            in the policy that runs live.
    """
    with _without_collector():
        return Simulation(plant, workload, mode, skip).run()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Stop the search for cycles, which takes 40 % of the time with 10,000 engines and finds nothing: a group that ends breaks its own."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Simulation:
    """A simulation and its actors; see the module. All times are in seconds."""

    def __init__(self, plant: Plant, workload: Workload, mode: Mode, skip: int | None = None) -> None:
        self._state = state = RunState(plant, mode)
        self._engines = SimulatedEngines(state, workload.groups(plant.group_size, plant.seed), lambda response: self._scorer.add(response))
        self._scorer = SimulatedScorer(state, self._scored)
        self._queue = SimulatedQueue(state)
        self._trainer = SimulatedTrainer(state, self._queue, self._stepped, self._dropped)
        self._sync = SimulatedSync(state, self._engines, self._served)
        self._warm = min(2 * (state.law.max_staleness + 1), plant.steps // 2) if skip is None else skip
        self._since = Reading()

    def run(self) -> SimulatedRun:
        """See `simulate`."""
        state = self._state
        self._engines.start_groups()
        clock, engines, steps = state.clock, self._engines, state.plant.steps
        while state.steps < steps:
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

    # ------------------------------------------------------------ what follows when an actor has acted

    def _scored(self, group: SimulatedGroup) -> None:
        self._queue.put(group)
        self._fill()

    def _fill(self) -> None:
        """Let groups start, where whole batches do, and the trainer lease."""
        if self._state.mode != "async":
            self._engines.start_groups()
        self._trainer.try_lease()

    def _dropped(self) -> None:
        self._engines.start_groups()
        self._fill()

    def _stepped(self) -> None:
        if self._state.steps == self._warm:
            self._since = self._read()
        if self._sync.publishing:
            self._trainer.settling = True
            return
        self._sync.publish()
        self._fill()

    def _served(self) -> None:
        self._engines.start_groups()
        if self._trainer.settling:
            self._trainer.settling = False
            self._sync.publish()
        self._fill()

    def _read(self) -> Reading:
        """Bring the totals up to date and return a copy."""
        self._state.now.seconds = self._state.clock.now
        self._engines.read()
        return replace(self._state.now)
