"""What a plant may have beside engines that decode, against what can be counted by hand."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest

from asyncmoe.simulate.compare import compare
from asyncmoe.simulate.fleet import Fleet
from asyncmoe.simulate.plant import Plant
from asyncmoe.simulate.simulation import Simulation, simulate
from asyncmoe.simulate.state import SimulatedGroup
from asyncmoe.simulate.workload import Workload, fixed, parse
from asyncmoe.telemetry.format import percent
from asyncmoe.trainer.data.schedule import cost
from tests.unit.command_line import run_command

ONE = Plant().having({"engines.count": 1, "engines.max_running": 8, "groups_per_step": 1, "trainer.step_s": 5.0, "steps": 4})
"""One engine, whose slots are one group of 8 responses."""
HUNDRED = parse("fixed:tokens=100")


def synchronous(changes: dict[str, Any], workload: Workload = HUNDRED) -> float:
    """Seconds of a synchronous step."""
    return simulate(ONE.having(changes), workload, "sync").step_s


def test_members_of_a_group_share_their_prompt() -> None:
    """The first one's is prefilled whole, of the others' what the cache has not."""
    plain = synchronous({})
    assert plain == pytest.approx(100 * ONE.step(8) + 5.0)
    prefill = {"prompt_tokens": 1000, "engines.prefill_token_s": 1e-3, "engines.prefill_s": 0.25, "engines.prefill_chunk": 512}
    assert synchronous(prefill) - plain == pytest.approx(8 * 1.0 + 16 * 0.25)
    assert synchronous({**prefill, "engines.prefix_hits": 0.75}) - plain == pytest.approx(2.75 + 6 * 0.25)
    assert synchronous({**prefill, "engines.prefix_hits": 1.0}) - plain == pytest.approx(1.0 + 2 * 0.25)


def test_later_turns_find_the_conversation_so_far() -> None:
    """Two turns of 100 tokens after a prompt of 50, with a tool's answer of 30 between them."""
    agents = Workload("agents", fixed(100), turns=(0.0, 1.0))
    keys = {"group_size": 1, "prompt_tokens": 50, "tool_tokens": 30, "engines.prefill_token_s": 1e-3}
    plain = synchronous({"group_size": 1}, agents)
    assert plain == pytest.approx(200 * ONE.step(1) + 5.0)
    assert synchronous(keys, agents) - plain == pytest.approx((50 + 180) * 1e-3)
    assert synchronous({**keys, "engines.prefix_hits": 1.0}, agents) - plain == pytest.approx((50 + 30) * 1e-3)


def test_training_takes_as_long_as_the_live_schedule_counts() -> None:
    tokens = Plant().having({"trainer.token_s": 0.01, "trainer.step_s": 2.0})
    attention = tokens.having({"trainer.attention_width": 4096})
    lengths = [17, 900, 4096, 20_000]
    assert tokens.train_s(lengths) == pytest.approx(2 + 0.01 * sum(lengths))
    assert attention.train_s(lengths) == pytest.approx(2 + 0.01 * sum(cost(length, 4096) for length in lengths) / 4096)
    found = simulate(ONE.having({"trainer.token_s": 1e-3, "prompt_tokens": 20}), HUNDRED, "sync")
    assert found.train_s == pytest.approx(5 + 8 * 120 * 1e-3)


def test_the_sweep_scales_all_of_a_training_step() -> None:
    plant = ONE.having({"trainer.token_s": 1e-3})
    half = plant.having({"trainer.gpus": 8, **plant.with_trainer(8)})
    assert half.train_s([100, 200]) == pytest.approx(2 * plant.train_s([100, 200]))


def test_a_batch_is_fetched_before_it_is_trained_on() -> None:
    fetched = {"trainer.bytes_per_token": 349.0, "trainer.fetch_bytes_per_s": 1e5}
    assert synchronous(fetched) - synchronous({}) == pytest.approx(8 * 100 * 349 / 1e5)
    found = simulate(ONE.having(fetched), HUNDRED, "sync")
    assert found.step_s == pytest.approx(found.train_s + found.wait_s)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_are_slower_than_engines_set_the_pace(workers: int) -> None:
    plant = Plant().having(
        {
            "engines.count": 4,
            "engines.max_running": 16,
            "groups_per_step": 8,
            "group_size": 8,
            "trainer.step_s": 1.0,
            "steps": 40,
            "workers.count": workers,
            "workers.tokens_per_s": 400.0,
        }
    )
    assert simulate(plant, HUNDRED).step_s == pytest.approx(64 * 100 / 400 / workers, rel=0.02)


def test_a_node_takes_all_its_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: dict[float, set[int]] = {}
    kill = Fleet.kill

    def noted(fleet: Fleet[Any], number: int, now: float) -> list[Any]:
        killed.setdefault(now, set()).add(number)
        return kill(fleet, number, now)

    monkeypatch.setattr(Fleet, "kill", noted)
    keys = {"engines.count": 10, "engines.per_node": 4, "failures.node_mtbf_s": 150.0, "failures.engine_restart_s": 10.0}
    found = simulate(Plant().having({**keys, "groups_per_step": 8, "trainer.step_s": 20.0}), parse("lognormal:median=300"))
    nodes = [set(range(0, 4)), set(range(4, 8)), {8, 9}]
    assert len(killed) > 5
    assert all(any(lost <= node for node in nodes) for lost in killed.values())
    assert [node for node in nodes if node not in killed.values()] == []
    assert found.rejected["engine_died"]


def test_slow_engines_are_as_many_as_asked_and_the_law_knows() -> None:
    plant = Plant().having({"engines.slow_share": 0.25, "engines.slow_factor": 2.0})
    assert list(plant.slow_engines.values()) == [2.0] * 12
    assert plant.full_rate == pytest.approx(Plant().full_rate * (36 + 12 / 2) / 48)
    assert simulate(plant, parse("lognormal:median=300")).engine_rate <= 1


def test_engines_with_less_room_need_longer_and_train_the_same() -> None:
    keys = {"engines.count": 4, "engines.max_running": 32, "groups_per_step": 16, "engines.prefill_token_s": 1e-5, "steps": 6}
    narrow = {**keys, "engines.kv_tokens": 12_000}
    free, full = (simulate(Plant().having(one), parse("lognormal:median=1000,cap=8000"), "sync") for one in (keys, narrow))
    assert full.step_s > free.step_s
    assert (full.tokens, full.ledger) == (free.tokens, free.ledger)
    assert (free.preemptions, free.recomputed) == (0, 0)
    assert full.preemptions > 0
    assert full.recomputed > 0


def test_recomputing_contexts_at_each_version_costs_what_a_prefill_costs() -> None:
    keys = {"engines.count": 4, "groups_per_step": 8, "trainer.step_s": 2.0, "engines.prefill_token_s": 1e-5, "max_staleness": 8}
    kept, again = (simulate(Plant().having({**keys, "sync.recompute": value}), parse("math")) for value in (False, True))
    assert kept.recomputed == 0
    assert again.recomputed > 0
    assert again.step_s > kept.step_s


def test_groups_that_end_are_freed_without_the_collector_of_cycles() -> None:
    run = Simulation(Plant().having({"engines.count": 4, "groups_per_step": 16, "steps": 20}), parse("lognormal:median=300"), "async")
    gc.collect()
    gc.disable()
    try:
        run.run()
        alive = sum(isinstance(one, SimulatedGroup) for one in gc.get_objects())
    finally:
        gc.enable()
    assert 0 < alive <= 16 * 6, "of 320 groups, those under way"


def test_cautions_name_each_assumption_that_does_not_hold() -> None:
    found = compare(ONE.having({"steps": 8}), HUNDRED, ("async",))
    assert found.cautions == ()
    keys = {"engines.count": 50, "max_staleness": 1, "groups_per_step": 32, "engines.context_s": 1e-9, "trainer.step_s": 5.0}
    keys["engines.order"] = "longest_first"
    found = compare(Plant().having({**keys, "steps": 8}), parse("lognormal"), ("async",))
    slots, long, contexts, policies, lost = found.cautions
    assert slots.startswith("a batch of 256 responses does not fill the engines' 3,200 slots")
    assert f"last {found.pools.t_gen / found.rows['async'].outcome.step_s:.1f} steps, more than max_staleness = 1" in long
    assert "neither contexts" in contexts
    assert policies.startswith("engines.order=longest_first holds for the synchronous baseline too")
    assert found.rows["async"].outcome.lost > 0
    assert lost.startswith(f"async lost {percent(found.rows['async'].outcome.lost)} ")
    assert found.as_json()["cautions"] == list(found.cautions)


def test_what_is_lost_stands_next_to_the_speed_up() -> None:
    arguments = ["engines.count=50", "max_staleness=1", "groups_per_step=32", "trainer.step_s=5", "steps=8", "--mode", "async"]
    found = run_command(["simulate", *arguments], catch_exceptions=False, env={"COLUMNS": "140"})
    row = next(line for line in found.output.splitlines() if "speed-up, same pools" in line)
    assert re.search(r"1\.00x +│ +\d+\.\d\dx, \d+ % lost", row)
    assert "caution: async lost" in found.output
