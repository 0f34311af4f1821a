"""The engines: groups start as the capacity law allows, turns are sampled and sometimes wait for tools, engines fail and return."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from asyncmoe.simulate.fleet import Fleet
from asyncmoe.simulate.state import RunState, SimulatedGroup, SimulatedResponse
from asyncmoe.simulate.trace import Reading
from asyncmoe.simulate.workload import Episode, Floats

_ATTEMPTS = 3


class SimulatedEngines:
    """The generating pool.

    Args:
        groups: episodes of the groups to sample, without end.
        sampled: receives each response whose last turn is complete.
    """

    def __init__(self, state: RunState, groups: Iterator[list[Episode]], sampled: Callable[[SimulatedResponse], None]) -> None:
        plant = state.plant
        self._state, self._clock, self._groups, self._hand_over = state, state.clock, groups, sampled
        self._size, self._batch = plant.group_size, plant.batch
        self._fleet: Fleet[SimulatedResponse] = Fleet(plant.engines.count, plant.engines.max_running, plant.step, plant.engines.prefill_s)
        self._waiting: deque[SimulatedResponse] = deque()
        self._again: deque[tuple[list[Episode], int]] = deque()
        self._drained: Callable[[], None] | None = None
        self._served_at: list[Floats] = [self._fleet.clocks(0.0)]
        if plant.failures.engine_mtbf_s:
            self._clock.after(self._until_failure(plant.failures.engine_mtbf_s), self._fail)

    def start_groups(self) -> None:
        """Start as many groups as the policy allows."""
        state = self._state
        while state.law.may_start(state.ledger, self._size, state.version) and self._batch_may_start():
            state.ledger = state.ledger.start(self._size)
            episodes, attempt = self._again.popleft() if self._again else (next(self._groups), 0)
            self._waiting.extend(SimulatedGroup(episodes, attempt).members)
        self._place()

    def next_finish(self) -> float:
        """Return the time at which the next turn is complete; inf if there is none."""
        return self._clock.at_engine_time(self._fleet.next_finish())

    def finish_turn(self) -> None:
        """Complete the next turn, at the current time."""
        response, engine, start, end = self._fleet.finish()
        group = response.group
        self._count_tokens(response, engine, start, end)
        response.turn += 1
        if response.turn < len(response.turns):
            self._clock.after(response.tools[response.turn - 1], lambda: self._next_turn(response))
        elif not group.lost:
            self._hand_over(response)
        self._place()
        self._check_drained()

    def reject(self, group: SimulatedGroup, reason: str) -> None:
        """Cancel a group. If an engine's failure is the reason, it starts over with the same episodes, at most twice."""
        group.lost = True
        for member in group.members:
            self._fleet.cancel(member, self._clock.engine_time)
        self._state.ledger = self._state.ledger.reject(self._size)
        self._state.trace.rejected[reason] += self._size
        if reason == "engine_died" and group.attempt + 1 < _ATTEMPTS:
            self._again.append((group.episodes, group.attempt + 1))
        self.start_groups()
        self._check_drained()

    def drain(self, drained: Callable[[], None]) -> None:
        """Send no more requests until `land`; call `drained` once no request is running."""
        self._drained = drained
        self._check_drained()

    def land(self) -> None:
        """Serve the version of the state, and send requests again."""
        self._served_at.append(self._fleet.clocks(self._clock.engine_time))
        self._drained = None

    def read(self, reading: Reading) -> None:
        """Bring the engines' totals of a reading up to date."""
        self._fleet.settle(self._clock.engine_time)
        reading.busy, reading.sampled = self._fleet.busy, self._fleet.tokens

    def _batch_may_start(self) -> bool:
        """Return whether a group may start: modes with batches begin a batch only when nothing runs, but replace its lost groups."""
        ledger = self._state.ledger
        if self._state.mode == "async" or not ledger.running:
            return True
        return (ledger.accepted + ledger.running) % self._batch != 0

    def _place(self) -> None:
        fleet, waiting, version = self._fleet, self._waiting, self._state.version
        if self._drained is not None or self._clock.paused:
            return
        while waiting and fleet.free:
            response = waiting.popleft()
            group = response.group
            if group.lost:
                continue
            response.version = version
            group.oldest = min(group.oldest, version)
            fleet.place(response, response.turns[response.turn], self._clock.engine_time)

    def _next_turn(self, response: SimulatedResponse) -> None:
        self._waiting.append(response)
        self._place()

    def _count_tokens(self, response: SimulatedResponse, engine: int, start: float, end: float) -> None:
        """Split the tokens of a turn, from clock reading `start` to `end` of its engine, by the version that sampled them."""
        tokens, served = response.group.tokens, self._state.version
        for version in range(response.version + 1, served + 1):
            landed = float(self._served_at[version][engine])
            tokens[version - 1] = tokens.get(version - 1, 0.0) + landed - start
            start = landed
        tokens[served] = tokens.get(served, 0.0) + end - start

    def _check_drained(self) -> None:
        if self._drained is not None and not self._clock.paused and not self._fleet.in_flight:
            self._drained()

    def _until_failure(self, mtbf_s: float) -> float:
        return self._state.rng.expovariate(self._state.plant.engines.count / mtbf_s)

    def _fail(self) -> None:
        failures, engine = self._state.plant.failures, self._state.rng.randrange(self._state.plant.engines.count)
        assert failures.engine_mtbf_s is not None
        if self._fleet.serves(engine):
            groups = {id(response.group): response.group for response in self._fleet.kill(engine, self._clock.engine_time)}
            self._clock.after(failures.engine_restart_s, lambda: self._return(engine))
            for group in groups.values():
                self.reject(group, "engine_died")
            self._check_drained()
        self._clock.after(self._until_failure(failures.engine_mtbf_s), self._fail)

    def _return(self, engine: int) -> None:
        self._fleet.restore(engine, self._clock.engine_time)
        self._place()
