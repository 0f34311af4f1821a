"""Interval algebra: unions, intersections and their lengths.

Intervals are half-open [begin, end) pairs of floats; an interval with end <= begin is empty and ignored.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

Interval = tuple[float, float]


def union(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Return the union as disjoint intervals in ascending order; merges neighbours at most `gap` apart."""
    merged: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and begin - merged[-1][1] <= gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Return the length of the union."""
    return sum(end - begin for begin, end in union(intervals))


def intersection(one: Iterable[Interval], other: Iterable[Interval]) -> list[Interval]:
    """Return the intersection of both unions as disjoint intervals in ascending order."""
    left, right = union(one), union(other)
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            common.append((begin, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return common


@dataclass(frozen=True)
class Cover:
    """A union, indexed for repeated queries of how much of a window it covers."""

    begins: Sequence[float]
    ends: Sequence[float]
    before_begin: Sequence[float]
    """Covered length before each begin."""

    @classmethod
    def of(cls, intervals: Iterable[Interval]) -> Cover:
        disjoint = union(intervals)
        lengths = (end - begin for begin, end in disjoint)
        return cls([b for b, _ in disjoint], [e for _, e in disjoint], list(accumulate(lengths, initial=0.0))[:-1])

    def within(self, begin: float, end: float) -> float:
        """Return the covered length of [begin, end)."""
        return self._before(end) - self._before(begin) if end > begin else 0.0

    def _before(self, time: float) -> float:
        index = bisect_right(self.begins, time) - 1
        if index < 0:
            return 0.0
        return self.before_begin[index] + min(time, self.ends[index]) - self.begins[index]
