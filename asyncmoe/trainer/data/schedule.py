"""Assignment of trajectories to the micro-batches of ranks.

The schedule is a pure function of plain data: every rank computes all of it, and all ranks agree without communication. This takes
O(n log n) time for n trajectories.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncmoe.errors import InvariantBroken
from asyncmoe.platform.zigzag import padded

Indices = tuple[int, ...]
Ranks = tuple[tuple[Indices, ...], ...]
"""The trajectories of each micro-batch of each data-parallel rank."""


@dataclass(frozen=True)
class BatchGrid:
    """Constraints that the trainer's parallel sizes put on micro-batches.

    Attributes:
        tp: tensor-parallel ranks, which hold equal consecutive parts of the rows.
        cp: context-parallel ranks, which hold equal parts of every sequence (`asyncmoe.platform.zigzag`); tp divides each rank's part.
        stages: pipeline stages if model chunks interleave; 1 if every stage holds one chunk. Megatron's interleaved schedule deals out
            micro-batches in rounds of one per stage and does not announce row counts to the receiving stage, so all micro-batches have
            the same row count.
        block: each rank's row count is a multiple of this, as float8 layers require.
    """

    tp: int = 1
    stages: int = 1
    cp: int = 1
    block: int = 1

    @property
    def rows(self) -> int:
        """A micro-batch's row count is a multiple of this."""
        return self.tp * self.block * padded(1, self.cp)

    def of(self, length: int) -> int:
        """Return the rows of a trajectory of `length` tokens."""
        return padded(length, self.cp)


@dataclass(frozen=True)
class Schedule:
    """The micro-batches of a step. `ranks[d][m]` lists the trajectories in micro-batch `m` of data-parallel rank `d`. Every micro-batch is
    padded to `rows` rows; 0: each has as many rows as it needs.

    Invariants:
        every trajectory is in exactly one micro-batch;
        all ranks have the same number of micro-batches, at least one (expert parallelism spans data-parallel ranks: its all-to-alls need
        the same number of forward passes everywhere), a multiple of `BatchGrid.stages`; an empty micro-batch is filler;
        a micro-batch has at most `tokens_per_microbatch` rows after padding, unless it is a single longer trajectory;
        the costs of any two ranks differ by at most the cost of the costliest micro-batch;
        the schedule depends only on the arguments.
    """

    ranks: Ranks
    rows: int = 0

    def indices(self, dp_rank: int) -> list[int]:
        """The trajectories that rank `dp_rank` trains on and therefore fetches."""
        return [index for microbatch in self.ranks[dp_rank] for index in microbatch]


def cost(length: int, width: int) -> int:
    """Return the cost of computing a trajectory of s tokens: s^2 + s w, where s^2 is attention's share.

    Args:
        width: w, the length at which attention costs as much as everything else (`asyncmoe.models.cost.attention_width`); 0: ignore
            attention and return s.
    """
    return length * (length + width) if width else length


def schedule(lengths: Sequence[int], dp: int, tokens_per_microbatch: int, pack: bool, grid: BatchGrid, width: int = 0) -> Schedule:
    """Distribute trajectories over `dp` ranks by cost.

    Micro-batches are made as equal as possible, sorted by cost and dealt in turn, so the m-th micro-batches of all ranks, which wait for
    each other in every expert all-to-all, cost about the same. Their number depends on tokens alone.

    Args:
        lengths: token count of each trajectory, > 0.
        dp: data-parallel ranks.
        tokens_per_microbatch: row limit of a packed micro-batch; a longer trajectory gets a micro-batch of its own.
        pack: put several trajectories into a micro-batch; if False, each gets its own.
        grid: the trainer's constraints.
        width: as for `cost`.
    """
    bound, multiple = tokens_per_microbatch - tokens_per_microbatch % grid.rows, dp * grid.stages
    costs = [cost(length, width) for length in lengths]
    lengths = [grid.of(length) for length in lengths]
    bins: list[Indices] = _bins(lengths, costs, multiple, bound) if pack else [(index,) for index in range(len(lengths))]
    bins += [()] * (-len(bins) % multiple)
    bins = bins or [()] * multiple
    bins.sort(key=lambda b: (-_sum(b, costs), b))
    largest = max(1, *(_sum(b, lengths) for b in bins))
    rows = largest + -largest % grid.rows if grid.stages > 1 else 0
    return Schedule(tuple(tuple(bins[rank::dp]) for rank in range(dp)), rows)


def _bins(lengths: Sequence[int], costs: Sequence[int], multiple: int, bound: int) -> list[Indices]:
    """Return micro-batches of at most `bound` rows; their number is a multiple of `multiple` if there are enough trajectories.

    They are balanced by cost if that respects the bound, else by token count if that does; else they are packed by best fit, and the
    costliest are split.
    """
    tight = best_fit_decreasing(lengths, bound)
    count = len(tight) + -len(tight) % multiple
    for values in [costs, lengths] if costs != lengths else [lengths]:
        even = _evenly(range(len(lengths)), values, count)
        if all(len(b) == 1 or _sum(b, lengths) <= bound for b in even):
            return even
    return _split_largest(tight, costs, count)


def best_fit_decreasing(lengths: Sequence[int], bound: int) -> list[Indices]:
    """Put each index, longest first, into the bin in which it leaves the least room, or a new one."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (room left, bin), ascending
    for index in _largest_first(range(len(lengths)), lengths):
        at = bisect_left(room, (lengths[index], 0))
        left, place = room.pop(at) if at < len(room) else (bound, len(bins))
        if place == len(bins):
            bins.append([])
        bins[place].append(index)
        insort(room, (left - lengths[index], place))
    return [tuple(sorted(b)) for b in bins]


def _evenly(indices: Sequence[int], values: Sequence[int], count: int) -> list[Indices]:
    """Return `count` bins with similar sums, fewer if there are fewer indices: each index, largest first, goes to the smallest bin."""
    heap: list[tuple[int, int]] = [(0, i) for i in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    for index in _largest_first(indices, values):
        held, place = heap[0]
        bins[place].append(index)
        heapq.heapreplace(heap, (held + values[index], place))
    return [tuple(sorted(b)) for b in bins if b]


def _split_largest(bins: Sequence[Indices], costs: Sequence[int], count: int) -> list[Indices]:
    """Halve the costliest bin that has several trajectories until there are `count` bins, or none can be halved. Never exceeds a bound."""
    heap = [(-_sum(b, costs), b) for b in bins if len(b) > 1]
    heapq.heapify(heap)
    found: list[Indices] = [b for b in bins if len(b) == 1]
    while heap and len(found) + len(heap) < count:
        _, largest = heapq.heappop(heap)
        for half in _evenly(largest, costs, 2):
            if len(half) > 1:
                heapq.heappush(heap, (-_sum(half, costs), half))
            else:
                found.append(half)
    return [*found, *(b for _, b in heap)]


def _largest_first(indices: Sequence[int], values: Sequence[int]) -> list[int]:
    return sorted(indices, key=lambda i: (-values[i], i))


def _sum(indices: Indices, values: Sequence[int]) -> int:
    return sum(values[i] for i in indices)


def split_updates(groups: Sequence[int], updates: int) -> list[list[int]]:
    """Split a batch into `updates` parts of whole groups, in order; `groups[i]` is the group of trajectory i.

    Returns the trajectory indices of each part; the first parts get the groups left over by an uneven division.
    """
    order = list(dict.fromkeys(groups))
    if not 0 < updates <= len(order):
        raise InvariantBroken(f"split_updates: got {updates} updates, expected 1 to {len(order)}, the number of groups")
    parts = [set(some) for some in np.array_split(np.array(order), updates)]
    return [[i for i, group in enumerate(groups) if group in part] for part in parts]
