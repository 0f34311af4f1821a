"""Policies that decide what is sampled when: each prompt is still trained once, and the tail is as short as it should be."""

from __future__ import annotations

import pytest

from asyncmoe.simulate.compare import compare
from asyncmoe.simulate.plant import Mode, Plant
from asyncmoe.simulate.simulation import simulate
from asyncmoe.simulate.workload import parse
from asyncmoe.telemetry.format import percent

SMALL = Plant().having(
    {"engines.count": 4, "engines.max_running": 8, "groups_per_step": 8, "group_size": 4, "trainer.step_s": 2.0, "steps": 24}
)


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
