"""The rows of packed sequences that each context-parallel rank holds.

With n ranks every sequence, padded to a multiple of 2n rows, is cut into 2n equal chunks; rank r holds chunks r and 2n - 1 - r, so that all
ranks have equally many causal pairs. Rows keep their order within a rank. Transformer Engine cuts packed sequences the same way
(`thd_get_partitioned_indices`), and so does Megatron (`models/common/embeddings/rope_utils.py`, `_get_thd_freqs_on_this_cp_rank`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a sequence that a rank holds.

    Attributes:
        here: index of the first row among the rank's rows.
        begin: index of the sequence's first row among all rows.
        first: index of the chunk's first row among all rows.
        rows: number of rows.
    """

    here: int
    begin: int
    first: int
    rows: int


def padded(length: int, size: int) -> int:
    """Return the number of rows, over all `size` ranks, of a padded sequence of `length` tokens."""
    return length + -length % (2 * size) if size > 1 else length


def chunks(bounds: Sequence[int], size: int, rank: int) -> Iterator[Chunk]:
    """Yield the chunks of rank `rank` of `size`, in its order.

    Args:
        bounds: starts of the sequences among all rows, then the number of rows; multiples of `padded(1, size)`.
    """
    here = 0
    for begin, end in pairwise(bounds):
        rows = (end - begin) // padded(1, size)
        for number in (rank, 2 * size - 1 - rank) if size > 1 else (0,):
            yield Chunk(here, begin, begin + number * rows, rows)
            here += rows


def rows(bounds: Sequence[int], size: int, rank: int) -> torch.Tensor:
    """Return the numbers of a rank's rows among all rows: int64[T / size]. `bounds`: as for `chunks`."""
    return torch.cat([torch.arange(chunk.first, chunk.first + chunk.rows) for chunk in chunks(bounds, size, rank)])


def positions(cu_seqlens: torch.Tensor, count: int, size: int = 1, rank: int = 0) -> torch.Tensor:
    """Return the position of each of a rank's rows in its sequence: int64[count], computed on the device of `cu_seqlens`.

    Args:
        cu_seqlens: int32[n + 1]; `bounds` as for `chunks`.
        count: number of the rank's rows.
    """
    bounds = cu_seqlens // size
    every = torch.arange(count, device=cu_seqlens.device)
    sequence = torch.searchsorted(bounds, every, right=True) - 1
    position = every - bounds[sequence]
    if size == 1:
        return position
    chunk = (bounds[sequence + 1] - bounds[sequence]) // 2
    return position + torch.where(position < chunk, rank * chunk, 2 * (size - 1 - rank) * chunk + rank * chunk)
