"""Policies that decide what is sampled when: each prompt is still trained once, and the tail is as short as it should be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.simulate.compare import compare
from asyncmoe.simulate.plant import Mode, Plant
from asyncmoe.simulate.simulation import Simulation, simulate
from asyncmoe.simulate.training import SimulatedQueue
from asyncmoe.simulate.workload import Episode, Workload, parse
from asyncmoe.telemetry.format import percent

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
)
def test_tail_batching_trains_no_group_twice_and_forgets_none(factor: float, mode: Mode, seed: int) -> None:
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

    plant = SMALL.having({"tail_batching": factor, "seed": seed})
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
    again = {tuple(group) for group in engines._again}
    under_way = {tuple(group.episodes) for group in engines._round if not group.lost} - set(queued)
    assert len(put_off) == len(engines._rounds.deferred) < plant.groups_per_step * factor
    assert not put_off & (set(queued) | under_way | again)
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
    found = simulate(SMALL.having({"engines.order": order, "max_staleness": 2}), parse(workload), mode)
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


def test_cautions_name_each_assumption_that_does_not_hold() -> None:
    one = Plant().having({"engines.count": 1, "engines.max_running": 8, "groups_per_step": 1, "trainer.step_s": 5.0, "steps": 8})
    assert compare(one, parse("fixed:tokens=100"), ("async",)).cautions == ()
    keys = {"engines.count": 50, "max_staleness": 1, "groups_per_step": 32, "trainer.step_s": 5.0, "steps": 8}
    found = compare(Plant().having(keys), parse("lognormal"), ("async",))
    slots, long, lost = found.cautions
    assert slots.startswith("a batch of 256 responses does not fill the engines' 3,200 slots")
    assert f"last {found.pools.t_gen / found.rows['async'].outcome.step_s:.1f} steps, more than max_staleness = 1" in long
    assert found.rows["async"].outcome.lost > 0
    assert lost.startswith(f"async lost {percent(found.rows['async'].outcome.lost)} ")
