"""Tail batching as arithmetic: places and spare groups always add up, and nothing that was put off is forgotten."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.errors import InvariantBroken
from asyncmoe.queue.rounds import Rounds
from tests.unit.example_counts import examples


def finish(rounds: Rounds[int], late: list[int]) -> Rounds[int]:
    """Complete a round, whose spare groups are then `late`."""
    while not rounds.is_over:
        rounds = rounds.complete_one()
    return rounds.put_off(late)


def test_a_long_round_starts_what_was_put_off_in_its_order_and_alone() -> None:
    rounds, again = Rounds[int](4, 1.5).begin(4)
    assert (again, rounds.places, rounds.spare) == ((), 4, 2)
    rounds, again = finish(rounds, [10, 11]).begin(4)
    assert (again, rounds.spare) == ((), 2)
    rounds = finish(rounds, [12, 13])
    partly, again = rounds.begin(3)
    assert (again, partly.size, partly.spare) == ((), 3, 2), "a round of three places is no long one"
    rounds, again = rounds.begin(9)
    assert (again, rounds.size, rounds.spare) == ((10, 11, 12, 13), 4, 0)
    assert finish(rounds, []).deferred == ()


def test_without_a_factor_nothing_is_spare() -> None:
    rounds, again = Rounds[int](4).begin(4)
    assert (rounds.is_off, again, rounds.spare) == (True, (), 0)


def test_a_round_under_way_cannot_begin_and_one_that_is_not_over_puts_nothing_off() -> None:
    rounds, _ = Rounds[int](2, 1.5).begin(2)
    with pytest.raises(InvariantBroken):
        rounds.begin(2)
    with pytest.raises(InvariantBroken):
        rounds.put_off([1])
    with pytest.raises(InvariantBroken):
        finish(rounds, [])


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), needed=st.integers(1, 6), factor=st.sampled_from([1.0, 1.2, 1.5, 3.0]))
def test_whatever_fails_each_group_is_complete_lost_or_put_off_and_none_twice(data: st.DataObject, needed: int, factor: float) -> None:
    """A model that holds the groups by name; places are granted by a law that gives back what failed without a spare one."""
    rounds, fresh = Rounds[int](needed, factor), iter(range(10**6))
    complete: list[int] = []
    lost: list[int] = []
    put_off: list[int] = []
    for _ in range(data.draw(st.integers(1, 12))):
        admitted = data.draw(st.integers(1, 2 * needed))
        rounds, again = rounds.begin(admitted)
        assert list(again) == put_off[: len(again)]
        assert len(again) in (0, needed)
        assert not (again and rounds.spare)
        put_off = put_off[len(again) :]
        running = [*again, *(next(fresh) for _ in range(rounds.places + rounds.spare - len(again)))]
        assert len(running) == max(rounds.size, len(again), -(-factor * rounds.size // 1) if not again else 0)
        returned = 0
        while not rounds.is_over:
            assert len(running) + returned == rounds.size - rounds.complete + rounds.spare
            event = data.draw(st.sampled_from(["complete", "complete", "fail", "start"]))
            if event == "start" and returned:
                assert not rounds.is_full
                rounds, returned = rounds.start(), returned - 1
                running.append(next(fresh))
            elif event == "complete" and running and rounds.complete < rounds.places:
                complete.append(running.pop(data.draw(st.integers(0, len(running) - 1))))
                rounds = rounds.complete_one()
            elif event == "fail" and running and len(lost) < 40:
                lost.append(running.pop())
                rounds, spared = rounds.lose_one()
                returned += not spared
            elif returned:
                rounds, returned = rounds.start(), returned - 1
                running.append(next(fresh))
        put_off += running
        rounds = rounds.put_off(running)
        assert list(rounds.deferred) == put_off
    every = [*complete, *lost, *put_off]
    assert sorted(every) == list(range(len(every)))


def test_a_complete_group_that_fails_after_all_gives_its_place_back() -> None:
    rounds, _ = Rounds[int](2, 1.5).begin(2)
    rounds = finish(rounds, [7])
    rounds, spared = rounds.lose_one(was_complete=True)
    assert (spared, rounds.is_over, rounds.is_full, rounds.places) == (False, False, False, 1)
    rounds = rounds.start().complete_one()
    assert (rounds.is_over, rounds.deferred) == (True, (7,))
