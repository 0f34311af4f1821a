"""What `make test-chaos` takes for a violation, and a short part of it with the same draws in every run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncmoe.log.log import Place
from asyncmoe.queue.fold import LogState, RecordedGroup, RecordedLease
from asyncmoe.queue.records import LeasedGroup, StepLeased
from asyncmoe.trajectory import Trajectory
from tests.chaos import invariants, report, schedule
from tests.chaos.block import Block
from tests.chaos.faults import causes
from tests.chaos.invariants import Said
from tests.chaos.schedule import Fault
from tests.chaos.stand import weights
from tests.chaos.world import World, configuration


def step(number: int, *keys: str, start: str = "1.0") -> dict[str, Any]:
    return {"step": number, "start": start, "keys": list(keys), "digests": [f"of {key}" for key in keys]}


BEGUN = {"resumed_at": 0}
TWO = [BEGUN, step(1, "g0.e0.a0.t0", "g0.e1.a0.t0"), step(2, "g1.e0.a0.t0", "g1.e1.a0.t0")]


def test_steps_that_are_trained_again_on_their_batches_are_no_violation() -> None:
    again = [BEGUN, *TWO[1:], {"resumed_at": 1}, step(2, "g1.e0.a0.t0", "g1.e1.a0.t0", start="2.0"), step(3, "g2.e0.a0.t0")]
    assert list(invariants.trained_once(again)) == []


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ([{"resumed_at": 1}, step(2, "g1.e0.a0.t0", "g2.e1.a0.t0", start="2.0")], "another batch"),
        ([step(3, "g0.e1.a0.t1")], "steps 1 and 3"),
        ([step(4, "g2.e0.a0.t0")], "passed over"),
    ],
)
def test_a_sample_trained_twice_or_a_step_passed_over_is_found(more: list[dict[str, Any]], word: str) -> None:
    (found,) = invariants.trained_once([*TWO, *more])
    assert word in found


def test_a_finished_group_that_is_gone_or_moved_is_found() -> None:
    finished, keys = RecordedGroup(2, order=3, episodes=2, place=Place(0, 64)), ("g0.e0.a0.t0", "g0.e1.a0.t0")

    def lease(number: int, *keys: str) -> RecordedLease:
        terms = StepLeased(0, 2, 0, 0, (LeasedGroup(number, 1.0, keys, 1, 2, Place(0, 64)),))
        return RecordedLease(1, (number,), terms, ended="")

    before = LogState({0: replace(finished, number=0, step=0), 2: finished}, {0: lease(0, *keys)}, 0, 3)
    assert list(invariants.nothing_lost(None, before, TWO, ())) == []
    assert list(invariants.nothing_lost(before, replace(before, groups={2: finished}), TWO, ())) == []
    moved = replace(finished, place=Place(0, 900))
    for now, word in ((replace(before, groups={}), "is gone"), (replace(before, groups={2: moved}), "is now at")):
        assert any(word in one for one in invariants.nothing_lost(before, now, TWO, ()))
    other = replace(before, leases={0: lease(2, "g2.e0.a0.t0")})
    assert any("log's lease" in one for one in invariants.nothing_lost(None, other, TWO, ()))
    assert list(invariants.nothing_lost(None, replace(before, leases={4: lease(0, *keys)}), TWO, (), warm=4)) == []


def test_a_cause_that_was_not_done_is_found() -> None:
    kill = Fault(0, "kill", "rank.1", "any time", 0.0, 0.0, 0.0)
    said = Said("the trainer starts again, restart 1 of 5 without a new step: a rank was ended by SIGKILL, as when ...\n", "")
    assert list(invariants.cause_named(causes(kill), said)) == []
    assert list(invariants.cause_named(causes(replace(kill, target="controller")), said)) != []


def trajectory(parts: list[tuple[str, str]], versions: list[int]) -> Trajectory:
    sampler, tokens, logprobs = weights.Sampler((7, 8)), [7, 8], [0.0, 0.0]
    for at, one in enumerate(parts):
        logprobs.append(sampler.take(20 + at, one))
        tokens.append(20 + at)
    count = len(parts)
    return Trajectory(
        key="g0.e0.a0.t0",
        group=0,
        episode=0,
        tokens=np.array(tokens, dtype=np.int32),
        loss_mask=np.array([False, False, *[True] * count]),
        logprobs=np.array(logprobs, dtype=np.float32),
        versions=np.array([-1, -1, *versions], dtype=np.int32),
        reward=0.0,
        finish="stop",
    )


def test_a_token_tells_of_its_weights_and_its_prefix() -> None:
    old, new = weights.FIRST, ("2" * 24, "3" * 24)
    known = {0: {old}, 1: {new}}
    assert list(weights.faults(trajectory([old, old, new], [0, 0, 1]), known)) == []
    assert len(list(weights.faults(trajectory([old, (old[0], new[1])], [0, 1]), known))) == 1, "parts of two versions"
    assert len(list(weights.faults(trajectory([old, new], [0, 0]), known))) == 1, "another version than it says"
    whole = trajectory([old, old], [0, 0])
    whole.tokens[0] = 9
    assert len(list(weights.faults(whole, known))) == 2, "another prompt"


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
