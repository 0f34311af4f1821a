"""Assignment of trajectories to the micro-batches of ranks, and the tensors of a micro-batch.

Everything here is a pure function of plain data, so every rank computes the whole schedule and all ranks agree without communication.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from asyncmoe.errors import InvariantBroken
from asyncmoe.trainer.data import replay_data
from asyncmoe.trainer.data.replay_data import Experts, Support
from asyncmoe.trajectory import NOT_SAMPLED, Routing, Trajectory

Indices = tuple[int, ...]


@dataclass(frozen=True)
class BatchGrid:
    """Constraints that the trainer's parallel sizes put on micro-batches.

    Attributes:
        tp: tensor-parallel ranks, which hold equal consecutive parts of the rows.
        stages: pipeline stages if model chunks interleave; 1 if every stage holds one chunk. Megatron's interleaved schedule deals out
            micro-batches in rounds of one per stage and does not announce row counts to the receiving stage, so all micro-batches have
            the same row count.
    """

    tp: int = 1
    stages: int = 1

    @property
    def rows(self) -> int:
        """A micro-batch's row count is a multiple of this."""
        return self.tp


@dataclass(frozen=True)
class Schedule:
    """The micro-batches of a step. `ranks[d][m]` lists the trajectories in micro-batch `m` of data-parallel rank `d`. Every micro-batch is
    padded to `rows` rows; 0: each has as many rows as it needs.

    Invariants:
        every trajectory is in exactly one micro-batch;
        all ranks have the same number of micro-batches, at least one (expert parallelism spans data-parallel ranks: its all-to-alls need
        the same number of forward passes everywhere), a multiple of `BatchGrid.stages`; an empty micro-batch is filler;
        a micro-batch has at most `tokens_per_microbatch` rows after padding, unless it is a single longer trajectory;
        the token counts of any two ranks differ by at most the largest micro-batch;
        the schedule depends only on the arguments.
    """

    ranks: tuple[tuple[Indices, ...], ...]
    rows: int = 0

    @property
    def microbatches(self) -> int:
        """Micro-batches of each rank, filler included."""
        return len(self.ranks[0])

    def indices(self, dp_rank: int) -> list[int]:
        """The trajectories that rank `dp_rank` trains on and therefore fetches."""
        return [index for microbatch in self.ranks[dp_rank] for index in microbatch]


def schedule(lengths: Sequence[int], dp: int, tokens_per_microbatch: int, pack: bool, grid: BatchGrid) -> Schedule:
    """Distribute trajectories over `dp` ranks by token count.

    Micro-batches are made as equal as possible, sorted by size and dealt in turn, so the m-th micro-batches of all ranks, which wait for
    each other in every expert all-to-all, have similar sizes. Token counts stand for cost; the quadratic part of attention is ignored.

    Args:
        lengths: token count of each trajectory, > 0.
        dp: data-parallel ranks.
        tokens_per_microbatch: row limit of a packed micro-batch; a longer trajectory gets a micro-batch of its own.
        pack: put several trajectories into a micro-batch; if false, one.
        grid: the trainer's constraints.
    """
    if any(length <= 0 for length in lengths) or dp <= 0:
        raise InvariantBroken(f"schedule: got lengths {[n for n in lengths if n <= 0]} and dp {dp}, expected positive numbers")
    bound, multiple = tokens_per_microbatch - tokens_per_microbatch % grid.rows, dp * grid.stages
    bins: list[Indices] = _bins(lengths, multiple, bound) if pack else [(index,) for index in range(len(lengths))]
    bins += [()] * (-len(bins) % multiple)
    bins = bins or [()] * multiple
    bins.sort(key=lambda b: (-_tokens(b, lengths), b))
    largest = max(_tokens(bins[0], lengths), 1)
    rows = largest + -largest % grid.rows if grid.stages > 1 else 0
    return Schedule(tuple(tuple(bins[rank::dp]) for rank in range(dp)), rows)


def _bins(lengths: Sequence[int], multiple: int, bound: int) -> list[Indices]:
    """Return micro-batches within `bound`; their number is a multiple of `multiple` if there are enough trajectories."""
    tight = _first_fit_decreasing(lengths, bound)
    count = len(tight) + -len(tight) % multiple
    even = _evenly(lengths, count)
    if all(_tokens(b, lengths) <= bound or len(b) == 1 for b in even):
        return even
    while len(tight) < count:  # splitting never exceeds the bound
        largest = max(tight, key=lambda b: (len(b) > 1, _tokens(b, lengths)))
        if len(largest) == 1:
            break
        tight.remove(largest)
        tight += [tuple(largest[i] for i in half) for half in _evenly([lengths[i] for i in largest], 2)]
    return tight


def _first_fit_decreasing(lengths: Sequence[int], bound: int) -> list[Indices]:
    bins: list[list[int]] = []
    free: list[int] = []
    for index in _longest_first(lengths):
        place = next((i for i, room in enumerate(free) if room >= lengths[index]), None)
        if place is None:
            place = len(bins)
            bins.append([])
            free.append(bound)
        bins[place].append(index)
        free[place] -= lengths[index]
    return [tuple(sorted(b)) for b in bins]


def _evenly(lengths: Sequence[int], count: int) -> list[Indices]:
    """Return `count` bins with similar sums, fewer if there are fewer indices: each index, longest first, goes to the smallest bin."""
    heap: list[tuple[int, int]] = [(0, i) for i in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    for index in _longest_first(lengths):
        tokens, place = heapq.heappop(heap)
        bins[place].append(index)
        heapq.heappush(heap, (tokens + lengths[index], place))
    return [tuple(sorted(b)) for b in bins if b]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _tokens(indices: Indices, lengths: Sequence[int]) -> int:
    return sum(lengths[i] for i in indices)


def split_updates(groups: Sequence[int], updates: int) -> list[list[int]]:
    """Split a batch into `updates` parts of whole groups, in order; `groups[i]` is the group of trajectory i.

    Returns the trajectory indices of each part; the first parts get the groups left over by an uneven division.
    """
    order = list(dict.fromkeys(groups))
    if not 0 < updates <= len(order):
        raise InvariantBroken(f"split_updates: got {updates} updates of {len(order)} groups")
    part = {group: place for place, block in enumerate(np.array_split(np.array(order), updates)) for group in block.tolist()}
    return [[i for i, group in enumerate(groups) if part[group] == place] for place in range(updates)]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The rows of one forward pass: T rows, a multiple of the tensor-parallel size.

    Row t holds a token and the data of its target, the next token in the same trajectory; a trajectory's last row has no target (`mask`
    False). Trajectories lie one after another, followed by padding.

    Attributes:
        tokens: int64[1, T].
        positions: int64[1, T]; from 0 in each trajectory. (Megatron's rotary embedding computes its own, by row or by `cu_seqlens`.)
        targets: int64[T]; the next token, 0 if there is none.
        mask: bool[T]; True if the target was sampled and is trained on.
        behaviour: float32[T]; log-probability of the target when it was sampled, 0 outside `mask`.
        versions: int32[T]; version that sampled the target, `NOT_SAMPLED` outside `mask`.
        pure: bool[T]; True if the one version in `versions` computed the whole trajectory, keys and values included; False outside `mask`.
        advantages: float32[T]; 0 outside `mask`.
        weights: float32[T]; weight of the row in the step's loss; 0 outside `mask`.
        proximal: float32[T] or None; log-probability of the target under the trainer before the batch's first update.
        reference: float32[T] or None; log-probability of the target under the reference policy, over the whole vocabulary.
        cu_seqlens: int32[n + 1] or None; starts of the packed sequences, then T; padding is a sequence of its own. None: one sequence with
            padding at its end, which no earlier row sees.
        max_seqlen: length of the longest sequence.
        experts: recorded experts of every row, if routing is kept.
        support: the ids the targets were sampled from, if any were recorded.
        places: (trajectory index, first row, row count) of each trajectory.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    behaviour: torch.Tensor
    versions: torch.Tensor
    pure: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    proximal: torch.Tensor | None
    reference: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    max_seqlen: int
    experts: Experts | None
    support: Support | None
    places: tuple[tuple[int, int, int], ...]

    @property
    def rows(self) -> int:
        return self.tokens.shape[1]

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on another device."""
        movable = torch.Tensor | Experts | Support
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, movable)}
        return MicroBatch(**values | moved)


def pack(
    trajectories: Mapping[int, Trajectory],
    indices: Sequence[int],
    *,
    advantages: Sequence[float] | np.ndarray | Mapping[int, np.ndarray],
    weights: Sequence[float] | np.ndarray,
    grid: BatchGrid,
    packed: bool,
    rows: int = 0,
    proximal: Mapping[int, np.ndarray] | None = None,
    reference: Mapping[int, np.ndarray] | None = None,
    routing: Routing | None = None,
) -> MicroBatch:
    """Lay trajectories out as one micro-batch; without indices it is filler with no effect on the loss.

    Args:
        trajectories: by index; must include `indices`.
        indices: trajectories of the micro-batch; at most one if `packed` is False.
        advantages: by trajectory index; a number for all tokens, or float32[T_i] aligned with the tokens.
        weights: loss weight of a sampled token, by trajectory index of the whole step (`objective.token_weights`).
        grid: the trainer's constraints.
        packed: separate the sequences by `cu_seqlens`.
        rows: minimum row count; a multiple of `grid.rows` (`Schedule.rows`).
        proximal, reference: float32[T_i] per trajectory, aligned with its tokens, as returned by `step.logprobs_only`.
        routing: the layers whose recorded experts are replayed; None: routers choose live.
    """
    if not packed and len(indices) > 1:
        raise InvariantBroken(f"pack: got trajectories {tuple(indices)} for a micro-batch that is not packed, expected one")
    chosen = [trajectories[i] for i in indices]
    for trajectory in chosen:
        if trajectory.loss_mask[0]:
            raise InvariantBroken(f"pack: the first token of {trajectory.key} is marked as sampled, but nothing precedes it")
    lengths = [len(t) for t in chosen]
    starts = [0, *np.cumsum(lengths).tolist()]
    total = max(starts[-1], rows, 1)
    rows = total + -total % grid.rows

    flat = _Flat(rows, starts, lengths)
    mask = flat.next([t.loss_mask for t in chosen], np.bool_)
    return MicroBatch(
        tokens=flat.here([t.tokens for t in chosen], np.int64)[None],
        positions=flat.here([np.arange(n) for n in lengths], np.int64)[None],
        targets=flat.next([t.tokens for t in chosen], np.int64),
        mask=mask,
        behaviour=flat.next([t.logprobs for t in chosen], np.float32) * mask,
        versions=flat.next([t.versions for t in chosen], np.int32, NOT_SAMPLED),
        pure=flat.each([t.is_pure for t in chosen], np.bool_) & mask,
        advantages=flat.next([np.broadcast_to(advantages[i], n) for i, n in zip(indices, lengths, strict=True)], np.float32) * mask,
        weights=flat.each([float(weights[i]) for i in indices], np.float32) * mask,
        proximal=None if proximal is None else flat.next([proximal[i] for i in indices], np.float32) * mask,
        reference=None if reference is None else flat.next([reference[i] for i in indices], np.float32) * mask,
        cu_seqlens=torch.tensor([*starts, rows] if rows > starts[-1] else starts, dtype=torch.int32) if packed else None,
        max_seqlen=max([*lengths, rows - starts[-1]]) if packed else rows,
        experts=None if routing is None else replay_data.experts(chosen, starts, rows, routing),
        support=replay_data.support(chosen, starts, rows),
        places=tuple(zip(indices, starts[:-1], lengths, strict=True)),
    )


class _Flat:
    """Writes per-trajectory arrays into flat arrays of `rows` rows."""

    def __init__(self, rows: int, starts: Sequence[int], lengths: Sequence[int]) -> None:
        self.rows, self.spans = rows, [(start, start + n) for start, n in zip(starts, lengths, strict=False)]

    def here(self, arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> torch.Tensor:
        """Row t gets the value of token t."""
        out = np.zeros(self.rows, dtype)
        for (start, stop), array in zip(self.spans, arrays, strict=True):
            out[start:stop] = array
        return torch.from_numpy(out)

    def next(self, arrays: Sequence[np.ndarray], dtype: type[np.generic], nothing: int = 0) -> torch.Tensor:
        """Row t gets the value of token t + 1 of the same trajectory, or `nothing` if there is none."""
        out = np.full(self.rows, nothing, dtype)
        for (start, stop), array in zip(self.spans, arrays, strict=True):
            out[start : stop - 1] = array[1:]
        return torch.from_numpy(out)

    def each(self, values: Sequence[float], dtype: type[np.generic]) -> torch.Tensor:
        """All rows of a trajectory get its value."""
        out = np.zeros(self.rows, dtype)
        for (start, stop), value in zip(self.spans, values, strict=True):
            out[start:stop] = value
        return torch.from_numpy(out)
