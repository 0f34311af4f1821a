"""Which engines of a lost controller go on, and with what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.rollout.engines.takeover import Holding, Taken, judge
from asyncmoe.rpc.keeper_messages import EngineWeights


def test_an_engine_goes_on_with_the_version_that_it_holds() -> None:
    still = EngineWeights(7, 2, True)
    assert judge(still, 7) == Taken(Holding.SERVES, 7, 2)
    assert judge(EngineWeights(7, 2, True, "paused", 7, 3), 7) == Taken(Holding.SERVES, 7, 2)
    assert judge(EngineWeights(), 0) == Taken(Holding.SERVES, 0, 0), "no version has landed yet"


def test_one_that_started_again_waits_for_a_version() -> None:
    assert judge(EngineWeights(7, 2, True), 0).holding is Holding.WAITS


def test_one_that_took_the_version_under_way_serves_it_in_its_lineage() -> None:
    assert judge(EngineWeights(7, 2, True, "loading", 8, 3), 8) == Taken(Holding.SERVES, 8, 3)


def test_one_that_may_hold_part_of_a_version_is_doubtful() -> None:
    assert judge(EngineWeights(7, 2, True, "loading", 8, 3), 7).holding is Holding.DOUBTFUL
    assert judge(EngineWeights(7, 2, True, "loading", 7, 3), 7).holding is Holding.DOUBTFUL, (
        "its number tells nothing of a version sent anew"
    )


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_while_weights_are_written_only_the_whole_new_version_is_served(old: int, coming: int, reported: int, landed: bool) -> None:
    taken = judge(EngineWeights(old, 0, landed, "loading", coming, 1), reported)
    assert taken.holding is (Holding.SERVES if reported == coming != old else Holding.DOUBTFUL)
