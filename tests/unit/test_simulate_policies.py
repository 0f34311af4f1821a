"""Policies that decide what is sampled when: each prompt is still trained once, and the tail is as short as it should be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from asyncmoe.errors import ConfigError
from asyncmoe.simulate import command
from asyncmoe.simulate.actors.queue import SimulatedQueue
from asyncmoe.simulate.cautions import cautions
from asyncmoe.simulate.decoding import StepTime
from asyncmoe.simulate.fleet import Fleet
from asyncmoe.simulate.plant import Mode, Plant
from asyncmoe.simulate.simulation import Simulation, simulate
from asyncmoe.simulate.state import SimulatedGroup, SimulatedResponse
from asyncmoe.simulate.workload import Episode, Workload, parse

SMALL = Plant().having(
    {"engines.count": 4, "engines.max_running": 8, "groups_per_step": 8, "group_size": 4, "trainer.step_s": 2.0, "steps": 24}
)
BATCHES = st.sampled_from(["sync", "one_step_off"])


class Numbered(Workload):
    """Each group has lengths of its own, so that it can be told from all others."""

    def groups(self, size: int, seed: int) -> Iterator[list[Episode]]:
        for number, group in enumerate(super().groups(size, seed)):
            yield [((turns[0] + number / 1e6,), ()) for turns, _ in group]  # type: ignore[misc]  # a fraction is a name here


@settings(max_examples=20, deadline=None)
@given(
    factor=st.sampled_from([1.25, 1.5, 3.0]),
    mode=BATCHES,
    seed=st.integers(0, 1000),
    failing=st.sampled_from([None, 400.0]),
    scoring=st.sampled_from([0.0, 0.02]),
)
def test_tail_batching_trains_no_group_twice_and_forgets_none(
    factor: float, mode: Mode, seed: int, failing: float | None, scoring: float
) -> None:
    queued: Counter[tuple[Any, ...]] = Counter()
    drawn: list[tuple[Any, ...]] = []
    put = SimulatedQueue.put

    def noted(queue: SimulatedQueue, group: Any) -> None:
        queued[tuple(group.episodes)] += 1
        put(queue, group)

    class Watched(Numbered):
        def groups(self, size: int, seed: int) -> Iterator[list[Episode]]:
            for group in super().groups(size, seed):
                drawn.append(tuple(group))
                yield group

    plant = SMALL.having(
        {
            "tail_batching": factor,
            "seed": seed,
            "failures.engine_mtbf_s": failing,
            "failures.engine_restart_s": 5.0,
            "failures.scoring": scoring,
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedQueue, "put", noted)
        run = Simulation(plant, Watched("lognormal", parse("lognormal:median=200").tokens), mode)
        found = run.run()
    assert set(queued.values()) == {1}
    assert found.oldest_age <= found.max_staleness
    ledger = dict(found.ledger)
    assert ledger.pop("started") == sum(ledger.values())
    assert ledger["dropped"] == found.dropped["deferred"] > 0
    engines = run._engines
    put_off = {tuple(group) for group in engines._rounds.deferred}
    again = {tuple(group) for group, _ in engines._again}
    under_way = {tuple(group.episodes) for group in engines._round if not group.lost} - set(queued)
    assert len(put_off) == len(engines._rounds.deferred) < plant.groups_per_step * factor
    assert not put_off & (set(queued) | under_way | again)
    if not found.rejected:
        assert set(drawn) == set(queued) | put_off | under_way | again


def test_most_rounds_have_a_short_tail() -> None:
    """A tenth of the groups are 50 times as long as the others: more than half of all rounds have one, or with tail batching a quarter."""
    lengths = Workload("some", lambda z: 100.0 + 4900.0 * (z > 1.28), icc=1.0)
    plant = SMALL.having({"engines.max_running": 16, "steps": 80})
    plain, tail = (simulate(plant.having({"tail_batching": factor}), lengths, "sync") for factor in (1.0, 1.25))
    assert tail.step_s < 0.75 * plain.step_s
    assert tail.tokens == pytest.approx(plain.tokens, rel=0.25), "long responses are trained too"


@pytest.mark.parametrize("order", ["fifo", "longest_first", "probes_first"])
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("workload", ["lognormal:median=200,icc=0.5", "search"])
def test_an_order_changes_when_and_not_what(order: str, mode: Mode, workload: str) -> None:
    found = simulate(SMALL.having({"engines.order": order, "max_staleness": 2, "failures.engine_mtbf_s": 500.0}), parse(workload), mode)
    ledger = dict(found.ledger)
    assert ledger["trained"] == SMALL.steps * SMALL.batch
    assert ledger.pop("started") == sum(ledger.values())
    assert found.oldest_age <= found.max_staleness


def test_probes_shorten_synchronous_rounds_where_groups_are_alike() -> None:
    """With four times as many responses as slots, and members of a group nearly as long as each other."""
    plant = SMALL.having({"groups_per_step": 32})
    fifo, probes = (
        simulate(plant.having({"engines.order": order}), parse("lognormal:icc=0.9"), "sync") for order in ("fifo", "probes_first")
    )
    assert probes.tokens == fifo.tokens
    assert probes.step_s < 0.95 * fifo.step_s


AGENTS = SMALL.having(
    {
        "prompt_tokens": 2000,
        "tool_tokens": 500,
        "engines.prefix_hits": 1.0,
        "engines.prefill_s": 0.001,
        "engines.prefill_token_s": 1e-4,
        "engines.balance": "prefix_affine",
    }
)


class Placed(Fleet[SimulatedResponse]):
    """Notes where each turn goes, how many of its tokens are prefilled, and the loads at that moment."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.notes: list[tuple[SimulatedGroup, SimulatedResponse, int, int, float, float, dict[str, int]]] = []
        self._before: dict[str, int] = {}

    def choose(self, number: int | None = None) -> int:
        self._before = self.loads()
        return super().choose(number)

    def place(
        self,
        request: SimulatedResponse,
        tokens: int,
        now: float,
        context: float = 0.0,
        fresh: float = 0.0,
        number: int | None = None,
    ) -> None:
        assert number is not None
        self.notes.append((request.group, request, request.turn, number, context, fresh, self._before))
        super().place(request, tokens, now, context, fresh, number)


def placements(plant: Plant, workload: Workload, mode: Mode = "async") -> tuple[Placed, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncmoe.simulate.actors.engines.Fleet", Placed)
        run = Simulation(plant, workload, mode)
        found = run.run()
    fleet = run._engines._fleet
    assert isinstance(fleet, Placed)
    return fleet, found


@settings(max_examples=10, deadline=None)
@given(
    slack=st.integers(0, 8),
    seed=st.integers(0, 1000),
    failing=st.sampled_from([None, 100.0]),
    balance=st.sampled_from(["least_loaded", "prefix_affine"]),
)
def test_a_prefix_is_cached_where_it_was_and_no_engine_gets_more_than_the_slack(
    slack: int, seed: int, failing: float | None, balance: str
) -> None:
    """What is prefilled is exactly what the engine that was chosen has not had, by a table of our own."""
    plant = AGENTS.having(
        {
            "engines.affinity_slack": slack,
            "engines.balance": balance,
            "seed": seed,
            "steps": 6,
            "failures.engine_mtbf_s": failing,
            "failures.engine_restart_s": 2.0,
        }
    )
    fleet, found = placements(plant, parse("search"))
    ledger = dict(found.ledger)
    assert ledger.pop("started") == sum(ledger.values())
    had: dict[tuple[int, int], bool] = {}
    last: dict[int, int] = {}
    for group, response, turn, number, context, fresh, loads in fleet.notes:
        assert loads[str(number)] <= min(loads.values()) + (slack if balance == "prefix_affine" else 0)
        if turn and last[id(response)] == number:
            cached = context - plant.tool_tokens
        else:
            cached = plant.prompt_tokens if (id(group), number) in had else 0
        if failing is None:
            assert fresh == context - cached
        else:
            assert fresh >= context - cached
        had[id(group), number] = True
        last[id(response)] = number


def test_agents_are_faster_where_turns_return_to_their_engine() -> None:
    (scattered, slow), (together, fast) = (
        placements(AGENTS.having({"engines.balance": balance}), parse("search")) for balance in ("least_loaded", "prefix_affine")
    )
    prefilled, elsewhere = (sum(note[5] for note in fleet.notes) / sum(note[4] for note in fleet.notes) for fleet in (together, scattered))
    assert prefilled < 0.6 * elsewhere
    assert fast.tokens / fast.step_s > 1.2 * slow.tokens / slow.step_s


@settings(max_examples=30, deadline=None)
@given(limit=st.integers(1, 40), asked=st.lists(st.integers(1, 50), min_size=1, max_size=60), failing=st.integers(0, 2))
def test_requests_beyond_the_slots_wait_at_their_engine_and_all_finish(limit: int, asked: list[int], failing: int) -> None:
    begun: list[int] = []
    fleet: Fleet[int] = Fleet(3, 4, StepTime(0.01, 64.0), limit=limit, begun=begun.append)
    waiting, done = list(enumerate(asked)), list[int]()
    while waiting or fleet.in_flight:
        while waiting and fleet.has_room:
            number, tokens = waiting.pop(0)
            fleet.place(number, tokens, fleet._engines[0].since, number=fleet.choose(0) if fleet.serves(0) and number % 2 else None)
        assert fleet.in_flight <= limit
        assert all(engine.load <= 4 for engine in fleet._engines)
        assert fleet.in_flight == sum(fleet.loads().values())
        if len(done) == 5 and failing and fleet.serves(0):
            lost = fleet.kill(0, fleet.next_event())
            waiting += [(number, asked[number]) for number in lost]
            if failing == 2:
                fleet.restore(0, max(engine.since for engine in fleet._engines))
            continue
        found = fleet.happen() if fleet.next_event() < float("inf") else None
        if found is not None:
            done.append(found[0])
    assert sorted(done) == sorted(range(len(asked)))
    assert set(begun) == set(done)


SLOW = SMALL.having(
    {"engines.count": 8, "trainer.step_s": 8.0, "max_staleness": 2, "steps": 60, "scaling.patience_s": 10.0, "scaling.start_s": 5.0}
)


@pytest.mark.parametrize("first", [1, 8])
def test_engines_come_and_go_until_the_trainer_is_just_not_waiting(first: int) -> None:
    """Eight engines wait for this trainer, one does not keep up; from either side as fast as with eight, on fewer."""
    workload = parse("lognormal:median=200")
    every = simulate(SLOW, workload, skip=30)
    found = simulate(SLOW.having({"scaling.first": first}), workload, skip=30)
    assert every.engines_present == pytest.approx(8)
    assert found.engines_present < 0.8 * every.engines_present
    assert found.tokens / found.step_s > 0.9 * every.tokens / every.step_s
    ledger = dict(found.ledger)
    assert ledger.pop("started") == sum(ledger.values())


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), first=st.integers(1, 8), failing=st.sampled_from([None, 200.0]), limit=st.sampled_from([None, 20]))
def test_engines_that_leave_finish_what_they_have(seed: int, first: int, failing: float | None, limit: int | None) -> None:
    plant = SLOW.having(
        {
            "scaling.first": first,
            "scaling.patience_s": 2.0,
            "seed": seed,
            "steps": 20,
            "max_concurrent": limit,
            "failures.engine_mtbf_s": failing,
            "failures.engine_restart_s": 3.0,
        }
    )
    found = simulate(plant, parse("search:icc=0.5"))
    ledger = dict(found.ledger)
    assert ledger.pop("started") == sum(ledger.values())
    assert 1 - 1e-9 <= found.engines_present <= 8 + 1e-9
    if failing is None:
        assert not found.rejected, "nothing is lost with an engine that leaves"


def test_a_sweep_looks_for_a_fixed_number_of_engines() -> None:
    with pytest.raises(ConfigError, match=r"scaling\.first: got 2, expected null with --sweep"):
        command.run(SMALL.having({"scaling.first": 2}), "all", (1,))
    for wrong, why in (({"scaling.first": 5}, "at most engines.count = 4"), ({"scaling.low": 2.0}, "less than scaling.high")):
        with pytest.raises(ValidationError, match=why):
            SMALL.having(wrong)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"engines.order": "fifo"}, ""),
        ({"engines.balance": "prefix_affine"}, "engines.balance=prefix_affine holds for"),
        ({"tail_batching": 1.25, "engines.order": "probes_first"}, "tail_batching=1.25 and engines.order=probes_first hold for"),
    ],
)
def test_a_caution_names_the_policies_that_the_baseline_shares(asked: dict[str, Any], named: str) -> None:
    found = cautions(Plant().having(asked), 0.0, {})
    assert (found == ()) if not named else found[0].startswith(named)
