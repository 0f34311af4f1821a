"""The bench of batches: what it measures is right, whatever its speed."""

from __future__ import annotations

import msgspec
import pytest

from asyncmoe.errors import InvariantBroken
from benchmarks import batches
from benchmarks.batches_rank import RankTook, StepTook

CASE = batches.BatchCase(batch=16, tokens=10, steps=3)
STEP = StepTook(lease_s=0.1, fetch_s=0.2, first_s=0.3, exposed_s=0.7, cpu_s=0.5, tokens=20)
RANK = RankTook((msgspec.structs.replace(STEP, exposed_s=9.0), STEP, STEP), begun=10**8, peak=2 * 10**8)


def test_the_slowest_rank_counts_and_the_first_step_does_not() -> None:
    slow = msgspec.structs.replace(RANK, steps=(STEP, STEP, msgspec.structs.replace(STEP, exposed_s=1.7)), peak=3 * 10**8)
    found = batches.figures(CASE, [([RANK, slow], 600)], share=100)
    assert found == {
        "lease_s": 0.1,
        "fetch_s": 0.2,
        "first_s": 0.3,
        "exposed_s": 1.2,
        "cpu_s": 0.5,
        "exposed_s_max": 1.7,
        "peak_MB": 300.0,
        "begun_MB": 100.0,
        "copies": 2.0,
    }


def test_a_rank_that_got_something_else_is_an_error() -> None:
    other = msgspec.structs.replace(RANK, steps=(STEP, STEP, msgspec.structs.replace(STEP, tokens=19)))
    with pytest.raises(InvariantBroken, match=r"\[20, 20, 19\]"):
        batches.figures(CASE, [([RANK], 1), ([other], 1)], share=100)


@pytest.mark.thorough  # what a bench measures has tests of its own
def test_a_real_rank_takes_its_share_once() -> None:
    case = batches.BatchCase(batch=64, tokens=16, steps=3, compute_s=0.01)
    results = batches.run(case, rounds=1, ways=["tp1_ahead"])
    found = results["ways"]["tp1_ahead"]
    # The header of each frame says which layers are sent, in a byte more or less.
    assert found["copies"] == pytest.approx(1.0, abs=0.05)
    assert all(found[name] >= 0 for name in ("lease_s", "fetch_s", "first_s", "exposed_s", "cpu_s"))
    assert found["peak_MB"] >= found["begun_MB"] > 0
    assert f"{found['exposed_s']}" in batches.table(results)


def test_the_plan_of_a_step_is_timed() -> None:
    found = batches.scheduled(100)
    assert found["trajectories"] == 100
    assert found["s"] >= 0
