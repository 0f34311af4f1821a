"""What `make test-chaos` takes for a violation, and a short part of it with the same draws in every run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos import report, schedule
from tests.chaos.block import Block
from tests.chaos.schedule import Fault
from tests.chaos.world import World, configuration


def test_draws_are_the_same_in_every_run_and_meet_every_part() -> None:
    assert list(schedule.block(0, 3, 50)) == list(schedule.block(0, 3, 50))
    drawn = [fault for number in range(40) for fault in schedule.block(0, number, 50)]
    assert {fault.kind for fault in drawn} == set(schedule.KINDS)
    assert {fault.target for fault in drawn} == {target for _, targets in schedule.KINDS.values() for target in targets}
    killed = {(fault.target, fault.moment) for fault in drawn if fault.kind == "kill"}
    assert killed == {(target, moment) for target in schedule.PROCESSES for moment in schedule.MOMENTS}


SHORT = (
    Fault(0, "kill", "controller", "segment", 0.0, 0.0, 0.5),
    Fault(1, "kill", "rank.1", "checkpoint", 0.0, 0.0, 0.5),
    Fault(2, "kill", "engine.0", "staging", 0.0, 0.0, 0.5),
    Fault(3, "stop", "controller", "commit", 0.0, 1.0, 0.5),
    Fault(4, "kill", "worker.1", "payload", 0.0, 0.0, 0.5),
)


LOST = Fault(5, "kill", "supervisor", "any time", 0.0, 0.0, 0.2)


class Resumed(World):
    """A run that a lost controller ends, and that the same command resumes."""

    def configuration(self) -> dict[str, Any]:
        return configuration(self.folder, self.seed, orphan_s=0.0)


@pytest.mark.parametrize(
    ("world_of", "faults"), [(World, SHORT), pytest.param(Resumed, (*SHORT, LOST), marks=pytest.mark.thorough, id="resumed")]
)
def test_a_run_outlives_faults_at_seeded_moments(world_of: type[World], faults: tuple[Fault, ...]) -> None:
    with world_of(0) as world:
        records = [{"tier": "protocol", "block": 0, **one} for one in Block(world, faults).run()]
    assert [one["violations"] for one in records] == [[]] * (len(faults) + 1)
    told = report.summary(records)["protocol"]
    assert told["faults"] == len(faults)
    assert told["take_overs"] == ({"runs": 1, "engines": 2} if world_of is World else {"runs": 0, "engines": 0})
    assert told["finished_groups_lost"] == 0
    assert told["unfinished_tokens_cut"]["most_of_one_response"] <= 12, "a piece"
