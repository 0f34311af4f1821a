"""The violations that `make test-chaos` detects, and a short part of it with the same draws in every run."""

from __future__ import annotations

from tests.chaos import report, schedule
from tests.chaos.block import Block
from tests.chaos.schedule import Fault
from tests.chaos.world import World


def test_draws_are_the_same_in_every_run_and_meet_every_part() -> None:
    assert list(schedule.block(0, 3, 50)) == list(schedule.block(0, 3, 50))
    drawn = [fault for number in range(40) for fault in schedule.block(0, number, 50)]
    assert {fault.kind for fault in drawn} == set(schedule.KINDS)
    assert {fault.target for fault in drawn} == {target for _, targets in schedule.KINDS.values() for target in targets}
    killed = {(fault.target, fault.moment) for fault in drawn if fault.kind == "kill"}
    assert killed == {(target, moment) for target in schedule.PROCESSES for moment in schedule.MOMENTS}


SHORT = (
    Fault(0, "kill", "controller", "change", 0.0, 0.0, 0.5),
    Fault(1, "kill", "rank.1", "checkpoint", 0.0, 0.0, 0.5),
    Fault(2, "kill", "engine.0", "staging", 0.0, 0.0, 0.5),
    Fault(3, "stop", "controller", "commit", 0.0, 1.0, 0.5),
    Fault(4, "kill", "worker.1", "payload", 0.0, 0.0, 0.5),
)


def test_a_run_outlives_faults_at_seeded_moments() -> None:
    with World(0) as world:
        records = [{"tier": "protocol", "block": 0, **one} for one in Block(world, SHORT).run()]
    assert [one["violations"] for one in records] == [[]] * (len(SHORT) + 1)
    told = report.summary(records)["protocol"]
    assert told["faults"] == len(SHORT)
    assert told["take_overs"] == {"runs": 1, "engines": 2}
    assert told["finished_groups_lost"] == 0
    assert told["unfinished_tokens_cut"]["most_of_one_response"] <= 12, "a piece"
