"""The engines: groups start as the capacity law allows, turns are sampled and sometimes wait for tools, engines fail and return."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from asyncmoe.engines.scheduling import choose
from asyncmoe.queue.rounds import Rounds
from asyncmoe.simulate.actors.waiting import OrderedWaiting, waiting_of
from asyncmoe.simulate.actors.workers import SimulatedWorkers
from asyncmoe.simulate.decoding import Spans
from asyncmoe.simulate.fleet import Fleet
from asyncmoe.simulate.state import RunState, SimulatedGroup, SimulatedResponse
from asyncmoe.simulate.trace import Reading
from asyncmoe.simulate.workload import Episode

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
        self._fleet: Fleet[SimulatedResponse] = Fleet(
            plant.engines.count,
            plant.engines.max_running,
            plant.step,
            plant.engines.prefill_s,
            plant.context_costs,
            plant.slow_engines,
            plant.max_concurrent,
            self._begun,
        )
        self._with_contexts = plant.context_costs is not None
        self._workers, self._started = SimulatedWorkers(state), 0
        self._waiting = waiting_of(plant)
        self._rounds: Rounds[list[Episode]] = Rounds(plant.groups_per_step, 1.0 if state.mode == "async" else plant.tail_batching)
        self._round: list[SimulatedGroup] = []
        self._again: deque[tuple[list[Episode], int]] = deque()
        self._drained: Callable[[], None] | None = None
        self._served_at: list[list[float]] = [self._fleet.clocks(0.0).tolist()]
        nodes = -(-plant.engines.count // plant.engines.per_node)
        for units, size, mtbf_s in (
            (plant.engines.count, 1, plant.failures.engine_mtbf_s),
            (nodes, plant.engines.per_node, plant.failures.node_mtbf_s),
        ):
            if mtbf_s:
                self._expect_failure(units, size, mtbf_s)

    def start_groups(self) -> None:
        """Start as many groups as the policy allows."""
        state = self._state
        if count := self._may_start():
            state.ledger = state.ledger.start(count * self._size)
            if not self._rounds.is_off:
                count += self._begin_or_go_on(count)
            self._start(count)
        self._place()

    def _begin_or_go_on(self, count: int) -> int:
        """Let the round start so many groups; return how many spare ones start besides."""
        if not self._rounds.is_over:
            self._rounds = self._rounds.start(count)
            return 0
        self._rounds, again = self._rounds.begin(count)
        self._again.extend((episodes, 0) for episodes in again)
        self._round.clear()
        if spare := self._rounds.spare:
            self._state.ledger = self._state.ledger.start_spare(spare * self._size)
        return spare

    def completed(self) -> None:
        """Note that a group is complete; with tail batching, put off the others of a round that needs no more."""
        if self._rounds.is_off:
            return
        self._rounds = self._rounds.complete_one()
        if not self._rounds.is_over or not self._rounds.spare:
            return
        late = [group for group in self._round if group.left and not group.lost]
        for group in late:
            self._cancel(group)
            self._state.ledger = self._state.ledger.discard_spare(self._size)
            self._state.trace.dropped["deferred"] += self._size
        self._rounds = self._rounds.put_off([group.episodes for group in late])
        self._check_drained()

    @property
    def requests(self) -> int:
        """Requests at engines, or waiting for one."""
        return self._fleet.in_flight + len(self._waiting)

    @property
    def serving(self) -> int:
        """Engines that get requests."""
        return sum(map(self._fleet.serves, range(self._state.plant.engines.count)))

    def leave(self, number: int) -> None:
        """Have an engine finish what it has and serve no more."""
        self._fleet.leave(number)

    def leave_one(self) -> int | None:
        """Have the last of the engines that serve leave, unless it is the only one; return its number."""
        serving = [number for number in range(self._state.plant.engines.count) if self._fleet.serves(number)]
        if len(serving) < 2:
            return None
        self.leave(serving[-1])
        return serving[-1]

    def join(self, number: int) -> None:
        """Have an engine that has left serve again."""
        self._fleet.join(number, self._clock.engine_time)
        self._place()

    def next_event(self) -> float:
        """Return the time at which the next turn is complete, or a request is preempted; inf if there is none."""
        return self._clock.at_engine_time(self._fleet.next_event())

    def happen(self) -> None:
        """Let the next event happen, at the current time."""
        found = self._fleet.happen()
        if found is None:
            return
        response, engine, spans = found
        self._count_tokens(response, engine, spans)
        if isinstance(self._waiting, OrderedWaiting):
            self._waiting.learn(response)
        tokens = response.turns[response.turn]
        response.turn += 1
        response.sampled += tokens
        self._workers.take(response, tokens, self._taken)
        self._place()
        if self._drained is not None:
            self._check_drained()

    def _taken(self, response: SimulatedResponse) -> None:
        if response.turn < len(response.turns):
            self._clock.after(response.tools[response.turn - 1], lambda: self._next_turn(response))
        elif not response.group.lost:
            self._hand_over(response)

    def reject(self, group: SimulatedGroup, reason: str) -> None:
        """Cancel a group. If an engine's failure is the reason, it starts over with the same episodes, at most twice."""
        self._cancel(group)
        spared = False
        if not self._rounds.is_off:
            self._rounds, spared = self._rounds.lose_one()
        ledger = self._state.ledger
        self._state.ledger = ledger.reject_spare(self._size) if spared else ledger.reject(self._size)
        self._state.trace.rejected[reason] += self._size
        if reason == "engine_died" and group.attempt + 1 < _ATTEMPTS:
            self._again.append((group.episodes, group.attempt + 1))
        self.start_groups()
        self._check_drained()

    def _cancel(self, group: SimulatedGroup) -> None:
        group.lost = True
        for member in group.members:
            self._fleet.cancel(member, self._clock.engine_time)
        group.end()

    def drain(self, drained: Callable[[], None]) -> None:
        """Send no more requests until `land`; call `drained` once no request is running."""
        self._drained = drained
        self._check_drained()

    def land(self) -> None:
        """Serve the version of the state, and send requests again."""
        self._served_at.append(self._fleet.clocks(self._clock.engine_time).tolist())
        if self._state.plant.sync.recompute:
            self._fleet.recompute(self._clock.engine_time)
        self._drained = None

    def read(self, reading: Reading) -> None:
        """Bring the engines' totals of a reading up to date."""
        self._fleet.settle(self._clock.engine_time)
        reading.busy, reading.sampled = self._fleet.busy, self._fleet.tokens
        reading.preemptions, reading.recomputed = self._fleet.preemptions, self._fleet.recomputed

    def _start(self, count: int) -> None:
        for _ in range(count):
            episodes, attempt = self._again.popleft() if self._again else (next(self._groups), 0)
            group = SimulatedGroup(episodes, attempt, self._started)
            self._started += 1
            self._waiting.extend(group.members)
            if not self._rounds.is_off:
                self._round.append(group)

    def _may_start(self) -> int:
        """Return how many groups may start now: at most a batch less what is under way, in modes that start whole batches."""
        state, size = self._state, self._size
        if not state.law.may_start(state.ledger, size, state.version):
            return 0
        under_way = (state.ledger.accepted + state.ledger.running) % self._batch
        if state.mode != "async":
            if state.ledger.running and not under_way:
                return 0
            return self._most((self._batch - under_way) // size)
        return self._most((state.law.max_staleness + 1) * self._batch // size)

    def _most(self, bound: int) -> int:
        """Return how many groups the law admits together, up to a bound; it admits one."""
        law, ledger, version = self._state.law, self._state.ledger, self._state.version
        return 1 + bisect_left(range(2, bound + 1), True, key=lambda count: not law.may_start(ledger, count * self._size, version))

    def _place(self) -> None:
        fleet, waiting = self._fleet, self._waiting
        if not waiting or self._drained is not None or self._clock.paused:
            return
        now = self._clock.engine_time
        while waiting and fleet.has_room:
            response = waiting.popleft()
            if response.group.lost:
                continue
            number = fleet.choose(self._chosen(response))
            context, fresh = self._context(response, fleet.cache(number)) if self._with_contexts else (0.0, 0.0)
            response.engine = number
            fleet.place(response, response.turns[response.turn], now, context, fresh, number)

    def _begun(self, response: SimulatedResponse) -> None:
        """Note the version that samples the first token of a turn."""
        response.version = version = self._state.version
        if version < response.group.oldest:
            response.group.oldest = version

    def _chosen(self, response: SimulatedResponse) -> int | None:
        """Return the engine for a response's turn, as the live pool chooses; None: the one with the fewest requests."""
        engines = self._state.plant.engines
        if engines.balance == "least_loaded":
            return None
        last = str(response.engine) if response.turn else ""
        return int(choose(self._fleet.loads(), str(response.group.number), engines.balance, engines.affinity_slack, last))

    def _context(self, response: SimulatedResponse, cache: int) -> tuple[float, float]:
        """Return the tokens before a turn, and how many of them the prefix cache does not have; from now on it has them."""
        plant, group = self._state.plant, response.group
        context = plant.prompt_tokens + response.sampled + plant.tool_tokens * response.turn
        if response.turn and response.cache == cache:
            known = context - plant.tool_tokens
        else:
            known = plant.prompt_tokens if cache in group.caches else 0
        response.cache = cache
        group.caches |= {cache}
        return context, context - plant.engines.prefix_hits * known

    def _next_turn(self, response: SimulatedResponse) -> None:
        self._waiting.append(response)
        self._place()

    def _count_tokens(self, response: SimulatedResponse, engine: int, spans: Spans) -> None:
        """Split the tokens of a turn by the version that sampled them."""
        tokens, served = response.group.tokens, self._state.version
        before = 0.0
        for version in range(response.version + 1, served + 1):
            until = _sampled(spans, self._served_at[version][engine])
            tokens[version - 1] = tokens.get(version - 1, 0.0) + until - before
            before = until
        tokens[served] = tokens.get(served, 0.0) + _sampled(spans, spans[-1][1]) - before

    def _check_drained(self) -> None:
        if self._drained is not None and not self._clock.paused and not self._fleet.in_flight:
            self._drained()

    def _expect_failure(self, units: int, size: int, mtbf_s: float) -> None:
        """Let one of so many units of `size` engines each fail, each on average once in `mtbf_s`, again and again."""
        self._clock.after(self._state.rng.expovariate(units / mtbf_s), lambda: self._fail(units, size, mtbf_s))

    def _fail(self, units: int, size: int, mtbf_s: float) -> None:
        first, now = self._state.rng.randrange(units) * size, self._clock.engine_time
        groups: dict[int, SimulatedGroup] = {}
        for engine in range(first, min(first + size, self._state.plant.engines.count)):
            if self._fleet.serves(engine):
                groups |= {id(response.group): response.group for response in self._fleet.kill(engine, now)}
                self._clock.after(self._state.plant.failures.engine_restart_s, partial(self._return, engine))
        for group in groups.values():
            self.reject(group, "engine_died")
        self._check_drained()
        self._expect_failure(units, size, mtbf_s)

    def _return(self, engine: int) -> None:
        self._fleet.restore(engine, self._clock.engine_time)
        self._place()


def _sampled(spans: Spans, clock: float) -> float:
    """Tokens of a turn that were sampled until a reading of its engine's clock."""
    start, end = spans[0]
    tokens = max(0.0, (clock if clock < end else end) - start)
    return tokens + sum(max(0.0, min(clock, end) - start) for start, end in spans[1:]) if len(spans) > 1 else tokens
