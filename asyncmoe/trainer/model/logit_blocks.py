"""Blocks of logits; each has all rows and a span of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from asyncmoe.models import head_blocks

LEAST = -80.0
"""Lower bound of exponents: exp is then a normal float32, ten times as fast on CPUs as smaller values, yet negligible in a sum."""


class LogitBlocks:
    """Computes the logits block by block in the same memory.

    Args:
        hidden: [n, H].
        weight: [v, H]; this rank's slice of the vocabulary.
        scale: multiplies the logits.
    """

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, scale: float) -> None:
        self._hidden, self._weight, self._scale = hidden, weight, scale
        self._rows, self._vocabulary = len(hidden), len(weight)
        self.width = head_blocks.width(self._rows, self._vocabulary, hidden.device.type == "cpu")
        self._exact = self.like(torch.float32)
        self._rounded = None if hidden.dtype == torch.float32 else self.like(hidden.dtype)

    def like(self, dtype: torch.dtype) -> torch.Tensor:
        """Allocate memory for a block: [n * width]."""
        return torch.empty(self._rows * self.width, dtype=dtype, device=self._hidden.device)

    def each(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield each block's first id, the id after its last, and its logits: float32[n, ids], valid until the next block. Logits of a
        bfloat16 model are rounded to bfloat16, as an output layer's are."""
        for first in range(0, self._vocabulary, self.width):
            last = min(first + self.width, self._vocabulary)
            ids = self._weight[first:last]
            block = self.shaped(self._exact, first, last)
            if self._rounded is None:
                torch.addmm(block, self._hidden, ids.t(), beta=0, alpha=self._scale, out=block)
            else:
                block.copy_(torch.mm(self._hidden, ids.t(), out=self.shaped(self._rounded, first, last)))
                if self._scale != 1.0:
                    block.mul_(self._scale)
            yield first, last, block

    def rounded(self, block: torch.Tensor) -> torch.Tensor:
        """Return a block in the dtype of the hidden rows; valid until the next block."""
        return block if self._rounded is None else self._rounded[: block.numel()].view(block.shape).copy_(block)

    def shaped(self, memory: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Return the start of the memory as [n, ids]."""
        return memory[: self._rows * (last - first)].view(self._rows, last - first)


def column_in(column: torch.Tensor, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each row whether the block has its id, bool[n], and the id's column in the block, int64[n, 1], 0 if not."""
    inside = (column >= first) & (column < last)
    return inside, torch.where(inside, column - first, 0)[:, None]


@dataclass(frozen=True)
class Cells:
    """The logits of given ids in given rows, as far as they are in a rank's slice of the vocabulary: places in blocks, ordered by block.

    Attributes:
        places: int64[m]; index in the block's flattened logits.
        rows: int64[m].
        ids: int64[m]; relative to the slice's first id.
        source: int64[m]; which of the given ids each is.
        ends: for each block, the number of cells up to its end.
    """

    places: torch.Tensor
    rows: torch.Tensor
    ids: torch.Tensor
    source: torch.Tensor
    ends: tuple[int, ...]

    @classmethod
    def of(cls, rows: torch.Tensor, ids: torch.Tensor, first: int, vocabulary: int, width: int) -> Cells:
        """Restrict ids, int64[k] like their rows, to [first, first + vocabulary) of the slice, in blocks of `width` ids."""
        source = ((ids >= first) & (ids < first + vocabulary)).nonzero().squeeze(1)
        block, order = torch.sort(torch.div(ids[source] - first, width, rounding_mode="floor"), stable=True)
        source = source[order]
        rows, ids = rows[source], ids[source] - first
        ends = torch.bincount(block, minlength=-(-vocabulary // width)).cumsum(0)
        wide = torch.clamp(vocabulary - block * width, max=width)
        return cls(rows * wide + ids - block * width, rows, ids, source, tuple(ends.tolist()))

    def spans(self) -> Iterator[slice]:
        """Yield each block's range of cells."""
        yield from (slice(a, b) for a, b in zip((0, *self.ends), self.ends, strict=False))
