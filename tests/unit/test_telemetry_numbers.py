"""Interval algebra against counting unit cells; counts by value have a bounded number of keys, and none is lost."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.telemetry import distribution
from asyncmoe.telemetry.distribution import STEPS
from asyncmoe.telemetry.overlap import Interval, intersection, length, union

times = st.integers(0, 40)
intervals = st.lists(st.tuples(times, times), max_size=12)


def cells(given_intervals: list[tuple[int, int]] | list[Interval]) -> set[int]:
    return {cell for begin, end in given_intervals for cell in range(int(begin), int(end))}


def disjoint_and_rising(found: list[Interval]) -> bool:
    return all(b < e for b, e in found) and all(one[1] <= two[0] for one, two in pairwise(found))


@given(intervals)
def test_union_and_length(one: list[tuple[int, int]]) -> None:
    found = union(one)
    assert cells(found) == cells(one)
    assert disjoint_and_rising(found)
    assert all(a[1] < b[0] for a, b in pairwise(found))
    assert length(one) == len(cells(one))


@given(intervals, intervals)
def test_intersection(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    found = intersection(one, other)
    assert cells(found) == cells(one) & cells(other)
    assert disjoint_and_rising(found)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=60))
def test_any_numbers_have_few_keys_and_none_is_lost(values: list[float]) -> None:
    found = distribution.counts(values)
    assert sum(found.values()) == len(values)
    assert len(found) <= STEPS + 2
    assert list(found) == sorted(found)
    assert all(map(math.isfinite, found))


@given(st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=60))
def test_a_number_moves_by_half_a_step_at_most(values: list[float]) -> None:
    step = distribution.grid_step(min(values), max(values))
    for value in values:
        assert abs(distribution.on_grid(value, step) - value) <= max(step / 2, 0.01 * abs(value)) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([0, 1, 1.0, 0], {0.0: 2, 1.0: 2}),
        ([0.0, 0.25, 0.5, 1.0], {0.0: 1, 0.25: 1, 0.5: 1, 1.0: 1}),
        ([-1.0, 0.1, 1.0], {-1.0: 1, 0.1: 1, 1.0: 1}),
        ([0.123456, 0.123456], {0.123: 2}),
        ([0, 100, 49.4, 49.6], {0.0: 1, 50.0: 2, 100.0: 1}),
        ([], {}),
    ],
)
def test_rewards_by_hand(values: list[float], found: dict[float, int]) -> None:
    assert distribution.counts(values) == found
