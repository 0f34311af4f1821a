"""Short packed sequences laid out as batches: one call of a kernel for many, where a call for each would cost more than its work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

_FREE = 32
"""Rows up to which sequences of any lengths share a batch: their padding costs less than another call."""
_SHARE = 0.8
"""Of the longest sequence of a batch, what the shortest has at least."""


@dataclass(frozen=True)
class Batches:
    """Where packed rows lie among batches of padded sequences.

    Attributes:
        shapes: (sequences, rows of each with padding) of each batch; they follow one another.
        place: int64[T]; for each packed row its row in the batches, distinct.
    """

    shapes: tuple[tuple[int, int], ...]
    place: np.ndarray

    @property
    def rows(self) -> int:
        """Rows of all batches, padding included."""
        return sum(count * longest for count, longest in self.shapes)

    @property
    def in_place(self) -> bool:
        """Whether the rows are laid out already: one sequence, or equal ones."""
        return self.rows == len(self.place) and bool((self.place == np.arange(len(self.place))).all())


def batches(bounds: Sequence[int], longest: int) -> Batches:
    """Lay packed sequences out as batches of similar lengths; padding follows each sequence's rows.

    Args:
        bounds: [n + 1]; starts of the sequences, then T, ascending from 0.
        longest: a longer sequence is a batch of its own, without padding.
    """
    spans = sorted((last - first, first) for first, last in pairwise(bounds) if last > first)
    place = np.empty(bounds[-1], np.int64)
    shapes: list[tuple[int, int]] = []
    begin, done = 0, 0
    while done < len(spans):
        least, end = spans[done][0], done + 1
        while end < len(spans) and spans[end][0] <= longest and spans[end][0] <= max(_FREE, least / _SHARE):
            end += 1
        width = spans[end - 1][0]
        for number, (length, first) in enumerate(spans[done:end]):
            start = begin + number * width
            place[first : first + length] = np.arange(start, start + length)
        shapes.append((end - done, width))
        begin, done = begin + (end - done) * width, end
    return Batches(tuple(shapes), place)


def spread(rows: torch.Tensor, place: torch.Tensor, count: int) -> torch.Tensor:
    """rows [T, ...] -> [count, ...]: row t becomes row place[t], distinct; 0 elsewhere. Differentiable."""
    made: torch.Tensor = _Spread.apply(rows, place, count)  # type: ignore[no-untyped-call]
    return made


def taken(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """rows [count, ...] -> [T, ...]: row t is row place[t], distinct. Differentiable."""
    made: torch.Tensor = _Taken.apply(rows, place)  # type: ignore[no-untyped-call]
    return made


class _Spread(torch.autograd.Function):
    """Unlike torch's own gradient of an index, neither direction adds: places are distinct."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, place: torch.Tensor, count: int) -> torch.Tensor:
        ctx.save_for_backward(place)
        return _put(rows, place, count)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.count = len(rows)
        return rows.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _put(gradient, ctx.saved_tensors[0], ctx.count), None


def _put(rows: torch.Tensor, place: torch.Tensor, count: int) -> torch.Tensor:
    return rows.new_zeros(count, *rows.shape[1:]).index_copy_(0, place, rows)
