"""Interval algebra against counting unit cells."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

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
