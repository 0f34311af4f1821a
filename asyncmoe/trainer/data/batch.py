"""The tensors of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from asyncmoe.errors import InvariantBroken
from asyncmoe.platform import zigzag
from asyncmoe.trainer.data import replay_data
from asyncmoe.trainer.data.replay_data import Experts, Support
from asyncmoe.trainer.data.schedule import BatchGrid
from asyncmoe.trajectory import NOT_SAMPLED, Routing, Trajectory

Place = tuple[int, int, int]
"""Trajectory index, first row, row count."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The rows of one forward pass: T rows, a multiple of the tensor-parallel size.

    Row t holds a token and the data of its target, the next token in the same trajectory; a trajectory's last row has no target (`mask`
    False). Trajectories follow one another, then padding. Context-parallel ranks hold T rows each (`part`); a target's data are in the
    token's row, whichever rank holds the target itself.

    Attributes:
        tokens: int64[1, T].
        positions: int64[1, T]; from 0 in each trajectory. (Megatron's rotary embedding computes its own, by row or by `cu_seqlens`.)
        targets: int64[T]; the next token, 0 if there is none.
        mask: bool[T]; True if the target was sampled and is trained on.
        behaviour: float32[T]; log-probability of the target when it was sampled, 0 outside `mask`.
        versions: int32[T]; version that sampled the target, `NOT_SAMPLED` outside `mask`.
        pure: bool[T]; True if the target's version computed the whole trajectory, keys and values included; False outside `mask`.
        advantages: float32[T]; 0 outside `mask`.
        weights: float32[T]; weight of the row in the step's loss; 0 outside `mask`.
        proximal: float32[T] or None; log-probability of the target under the trainer before the batch's first update.
        reference: float32[T] or None; log-probability of the target under the reference policy, over the whole vocabulary.
        cu_seqlens: int32[n + 1] or None; starts of the packed sequences, then T; padding is a sequence of its own. None: one sequence with
            padding at its end, which no earlier row sees.
            Never None under context parallelism, where it counts the rows of all ranks together (`whole`).
        max_seqlen: length of the longest sequence.
        segments: int64[T]; which of the trajectories in `places` the row belongs to, -1 for padding.
        experts: recorded experts of each row, if routing is kept.
        support: the ids the targets were sampled from, if any were recorded.
        places: where each trajectory is, among the rows of all context-parallel ranks together.
        whole: number of rows of all context-parallel ranks together.
        top_ids: int64[K, T] or None; the ids that were most probable where the target was sampled, if recorded.
        top_logprobs: float32[K, T] or None; their log-probabilities, like `behaviour`; -inf where there is no id.
        held: int64[T]; the numbers of this rank's rows among the `whole` rows; None: it holds all of them.
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
    segments: torch.Tensor
    experts: Experts | None
    support: Support | None
    places: tuple[Place, ...]
    whole: int
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    held: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.tokens.shape[1]

    def part(self, rows: torch.Tensor) -> MicroBatch:
        """Return the part that one context-parallel rank holds: the given rows, int64, ascending within each sequence."""
        by_row: dict[str, Any] = {name: value for name in _BY_ROW if (value := getattr(self, name)) is not None}
        for name, value in by_row.items():
            by_row[name] = value[..., rows] if isinstance(value, torch.Tensor) else value.take(rows)
        return replace(self, **by_row, held=rows)

    def everywhere(self, values: torch.Tensor) -> torch.Tensor:
        """Place values [T, ...] of this rank's rows among the rows of all context-parallel ranks: [whole, ...]; 0 for other ranks' rows."""
        return values if self.held is None else values.new_zeros(self.whole, *values.shape[1:]).index_copy_(0, self.held, values)

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on another device."""
        movable = torch.Tensor | Experts | Support
        moved: dict[str, Any] = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, movable)}
        return replace(self, **moved)


_BY_ROW = frozenset({f.name for f in fields(MicroBatch)} - {"cu_seqlens", "max_seqlen", "places", "whole", "held"})


def places_of(indices: Sequence[int], lengths: Sequence[int], grid: BatchGrid) -> tuple[Place, ...]:
    """Return the places of trajectories in a micro-batch, given their indices and lengths."""
    starts = np.cumsum([0, *map(grid.of, lengths)]).tolist()
    return tuple(zip(indices, starts[:-1], lengths, strict=True))


def rows_of(lengths: Sequence[int], grid: BatchGrid, rows: int = 0) -> int:
    """Return the row count of a micro-batch of trajectories of the given lengths; `rows` as for `pack`."""
    total = max(sum(map(grid.of, lengths)), rows, 1)
    return total + -total % grid.rows


def pack(
    trajectories: Mapping[int, Trajectory],
    indices: Sequence[int],
    *,
    advantages: Sequence[float] | np.ndarray | Mapping[int, np.ndarray],
    weights: Sequence[float] | np.ndarray | Mapping[int, float],
    grid: BatchGrid,
    packed: bool,
    rows: int = 0,
    cp_rank: int = 0,
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
        cp_rank: the context-parallel rank whose rows are returned.
        proximal, reference: float32[T_i] per trajectory, aligned with its tokens, as returned by `step.logprobs_only`.
        routing: the layers whose recorded experts are replayed; None: routers choose live.
    """
    chosen = [trajectories[i] for i in indices]
    for trajectory in chosen:
        if trajectory.loss_mask[0]:
            raise InvariantBroken(f"pack: the first token of {trajectory.key} is marked as sampled, but nothing precedes it")
    lengths = [len(t) for t in chosen]
    starts = [0, *np.cumsum([grid.of(length) for length in lengths]).tolist()]
    rows, packed = rows_of(lengths, grid, rows), packed or grid.cp > 1
    bounds = [*starts, rows] if rows > starts[-1] else starts

    flat, (top_ids, top_logprobs) = _Flat(rows, starts, lengths), replay_data.top(chosen, starts, rows)
    mask = flat.next([t.loss_mask for t in chosen], np.bool_)
    whole = MicroBatch(
        tokens=flat.here([t.tokens for t in chosen], np.int64)[None],
        positions=flat.here([np.arange(n) for n in lengths], np.int64)[None],
        targets=flat.next([t.tokens for t in chosen], np.int64),
        mask=mask,
        behaviour=flat.next([t.logprobs for t in chosen], np.float32) * mask,
        versions=flat.next([t.versions for t in chosen], np.int32, NOT_SAMPLED),
        pure=flat.here([t.is_pure for t in chosen], np.bool_) & mask,
        advantages=flat.next([np.broadcast_to(advantages[i], n) for i, n in zip(indices, lengths, strict=True)], np.float32) * mask,
        weights=flat.here([float(weights[i]) for i in indices], np.float32) * mask,
        proximal=None if proximal is None else flat.next([proximal[i] for i in indices], np.float32) * mask,
        reference=None if reference is None else flat.next([reference[i] for i in indices], np.float32) * mask,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32) if packed else None,
        max_seqlen=max(b - a for a, b in pairwise(bounds)) if packed else rows,
        segments=flat.here(range(len(chosen)), np.int64, -1),
        experts=None if routing is None else replay_data.experts(chosen, starts, rows, routing),
        support=replay_data.support(chosen, starts, rows),
        places=places_of(indices, lengths, grid),
        whole=rows,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )
    return whole.part(zigzag.rows(bounds, grid.cp, cp_rank)) if grid.cp > 1 else whole


class _Flat:
    """Writes per-trajectory arrays into flat arrays of `rows` rows."""

    def __init__(self, rows: int, starts: Sequence[int], lengths: Sequence[int]) -> None:
        self.rows, self.spans = rows, [(start, start + n) for start, n in zip(starts, lengths, strict=False)]

    def next(self, arrays: Sequence[np.ndarray], dtype: type[np.generic], nothing: int = 0) -> torch.Tensor:
        """Row t gets the value of token t + 1 of the same trajectory, or `nothing` if there is none."""
        out = np.full(self.rows, nothing, dtype)
        for (start, stop), array in zip(self.spans, arrays, strict=True):
            out[start : stop - 1] = array[1:]
        return torch.from_numpy(out)

    def here(self, values: Sequence[np.ndarray | float], dtype: type[np.generic], nothing: int = 0) -> torch.Tensor:
        """Row t gets the value of token t, or the single value of its trajectory; rows of padding get `nothing`."""
        out = np.full(self.rows, nothing, dtype)
        for (start, stop), value in zip(self.spans, values, strict=True):
            out[start:stop] = value
        return torch.from_numpy(out)
