"""The engines of a lost controller that continue, and their versions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.engines.takeover import EngineWeights, Taken, judge


def test_an_engine_goes_on_with_the_version_that_it_holds_or_waits_for_one() -> None:
    still = EngineWeights(7, 2, True)
    assert judge(still, 7) == Taken(7, 2)
    assert judge(EngineWeights(), 0) == Taken(0, 0), "no version has landed yet"
    assert judge(still, 0) == Taken(waits=True), "it started again"


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_while_weights_are_written_an_engine_serves_the_old_or_the_new_version_by_its_number(old: int, coming: int, reported: int) -> None:
    taken = judge(EngineWeights(old, 0, True, "loading", coming, 1), reported)
    match (reported == old, reported == coming):
        case (True, True):
            assert taken is None
        case (True, False):
            assert taken == Taken(old, 0)
        case (False, True):
            assert taken == Taken(coming, 1)
        case _:
            assert taken == Taken(waits=True)
