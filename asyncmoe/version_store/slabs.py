"""Slabs: how the pieces of a version lie in the objects of one rank.

A *slab* is a sequence of boxes of canonical tensors, each stored row-major, of one dtype and held by the same readers. It is read and
verified as a whole. Slabs begin at multiples of 8 bytes of their object, in order, and every box directly follows the one before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from asyncmoe.reshard.layout import MAX_DIMS
from asyncmoe.reshard.table import DTYPE_BYTES

ALIGNMENT = 8
PIECE_COLUMNS = 1 + 2 * MAX_DIMS
"""Number of the tensor, start, extent."""


@dataclass(frozen=True, eq=False)
class Slabs:
    """The slabs and objects of one rank.

    Attributes:
        pieces: int64[n, PIECE_COLUMNS].
        firsts: int64[slabs + 1]; slab i is `pieces[firsts[i]:firsts[i + 1]]`.
        dtypes: int64[slabs]; positions in `DTYPES`.
        objects: int64[objects + 1]; object j holds slabs `objects[j]` to `objects[j + 1] - 1`.
    """

    pieces: np.ndarray
    firsts: np.ndarray
    dtypes: np.ndarray
    objects: np.ndarray

    @staticmethod
    def packed(pieces: np.ndarray, firsts: np.ndarray, dtypes: np.ndarray, object_bytes: int) -> Slabs:
        """Divide slabs among objects of at most `object_bytes`, or of one slab."""
        alone = Slabs(pieces, firsts, dtypes, np.zeros(1, np.int64))
        return Slabs(pieces, firsts, dtypes, filled(_aligned(alone.slab_bytes), object_bytes))

    @cached_property
    def identity(self) -> int:
        """64 bits that name these slabs, on every machine: parts of a delta belong to them."""
        digest = hashlib.blake2b(digest_size=8, person=b"asyncmoe slabs")
        for part in (self.pieces, self.firsts, self.dtypes, self.objects):
            digest.update(b"%d " % part.size + part.astype("<i8").tobytes())
        return int.from_bytes(digest.digest(), "little")

    @cached_property
    def piece_bytes(self) -> np.ndarray:
        """int64[n]: bytes of each piece."""
        nbytes: np.ndarray = self.pieces[:, 1 + MAX_DIMS :].prod(1) * np.repeat(DTYPE_BYTES[self.dtypes], np.diff(self.firsts))
        return nbytes

    @property
    def element_count(self) -> int:
        """Elements in all slabs."""
        return int(self.pieces[:, 1 + MAX_DIMS :].prod(1).sum())

    @cached_property
    def slab_bytes(self) -> np.ndarray:
        """int64[slabs]: bytes of each slab."""
        nbytes: np.ndarray = np.diff(np.concatenate([[0], np.cumsum(self.piece_bytes)])[self.firsts])
        return nbytes

    @cached_property
    def slab_offsets(self) -> np.ndarray:
        """int64[slabs]: offset of each slab in its object."""
        ends = np.concatenate([[0], np.cumsum(_aligned(self.slab_bytes))])
        offsets: np.ndarray = ends[:-1] - np.repeat(ends[self.objects[:-1]], np.diff(self.objects))
        return offsets

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64[n]: offset of each piece in its object."""
        counts = np.diff(self.firsts)
        ends = np.concatenate([[0], np.cumsum(self.piece_bytes)])
        offsets: np.ndarray = ends[:-1] - np.repeat(ends[self.firsts[:-1]], counts) + np.repeat(self.slab_offsets, counts)
        return offsets

    @cached_property
    def object_bytes(self) -> np.ndarray:
        """int64[objects]: bytes of each object; the last slab is padded, too."""
        ends = np.concatenate([[0], np.cumsum(_aligned(self.slab_bytes))])
        return np.diff(ends[self.objects])


def _aligned(nbytes: np.ndarray) -> np.ndarray:
    aligned: np.ndarray = -(-nbytes // ALIGNMENT) * ALIGNMENT
    return aligned


def filled(nbytes: np.ndarray, most: int, edges: Sequence[int] | np.ndarray = ()) -> np.ndarray:
    """Divide a sequence of sizes into runs of at most `most` bytes together, or of one item; return the runs' first items and the end.

    Args:
        edges: items that begin a run in any case.
    """
    firsts, held, begins = [0], 0, set(np.asarray(edges).tolist())
    for i, size in enumerate(nbytes.tolist()):
        if i > firsts[-1] and (held + size > most or i in begins):
            firsts.append(i)
            held = 0
        held += size
    return np.array([*firsts, len(nbytes)] if len(nbytes) else [0], np.int64)
