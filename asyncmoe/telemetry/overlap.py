"""Interval algebra: how long something lasted in union, and how long two things lasted at once.

Intervals are half-open [begin, end) pairs of floats; those with end <= begin are empty and count for nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

Interval = tuple[float, float]


def union(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """The same points as disjoint intervals in rising order; neighbours at most `gap` apart become one."""
    merged: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and begin - merged[-1][1] <= gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Length of the union."""
    return sum(end - begin for begin, end in union(intervals))


def intersection(one: Iterable[Interval], other: Iterable[Interval]) -> list[Interval]:
    """The points that lie in both unions, as disjoint intervals in rising order."""
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
    """A union prepared for many questions of how much of a window it covers."""

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
        """Length covered of [begin, end)."""
        return self._before(end) - self._before(begin) if end > begin else 0.0

    def _before(self, time: float) -> float:
        index = bisect_right(self.begins, time) - 1
        if index < 0:
            return 0.0
        return self.before_begin[index] + min(time, self.ends[index]) - self.begins[index]
