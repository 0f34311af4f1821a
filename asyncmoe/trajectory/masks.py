"""Sampling masks: the vocabulary ids from which each token was sampled, as compressed sparse rows."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from asyncmoe.errors import ProtocolError, TrajectoryRejected
from asyncmoe.trajectory import _C
from asyncmoe.trajectory.native import Buffer, crc32c


@dataclass(frozen=True, eq=False)
class Masks:
    """Rows of ids: row t is `ids[offsets[t] : offsets[t + 1]]`.

    Attributes:
        offsets: int32[rows + 1].
        ids: int32[n], ascending within a row. A row without ids stands for the whole vocabulary, because no token is sampled from nothing.
        vocabulary: exclusive upper bound of the ids.
    """

    offsets: np.ndarray
    ids: np.ndarray
    vocabulary: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> np.ndarray:
        """int32[rows]: ids per row; 0 stands for the whole vocabulary."""
        counts: np.ndarray = np.diff(self.offsets)
        return counts


@dataclass(frozen=True)
class EncodedMasks:
    """Encoded masks; csrc/trajectory/masks.h defines the format.

    Attributes:
        rows: number of rows.
        ids: number of ids in all rows.
        vocabulary: exclusive upper bound of the ids.
        digest: CRC-32C of the numbers above and of `data`.
        data: the encoded bytes.
    """

    rows: int
    ids: int
    vocabulary: int
    digest: int
    data: Buffer


def encode_masks(masks: Masks, key: str) -> EncodedMasks:
    """Pack masks with fixed-width ids or as gaps, whichever is smaller.

    Args:
        key: the trajectory's key, for errors.

    Raises:
        TrajectoryRejected: "bad_mask": ids do not ascend or are outside the vocabulary, or offsets do not fit the ids.
    """
    try:
        made = _C.encode_masks(masks.offsets, masks.ids, masks.vocabulary)
    except (ValueError, TypeError) as error:  # TypeError: a wrong dtype; its text has the expected signature
        raise TrajectoryRejected("bad_mask", f"{key}: {error}") from error
    data = memoryview(made.data).toreadonly()
    rows, ids = len(masks), len(masks.ids)
    return EncodedMasks(rows, ids, masks.vocabulary, _digest(rows, ids, masks.vocabulary, data), data)


def check_masks(masks: EncodedMasks, key: str) -> None:
    """Detect corrupted masks without allocating memory.

    Raises:
        ProtocolError: numbers are out of bounds, or the digest disagrees.
    """
    m = masks
    if not (0 <= m.rows < (1 << 31) - 1 and 0 <= m.ids < 1 << 31 and 1 <= m.vocabulary < 1 << 31):
        raise ProtocolError(f"masks of {key}: got {m.rows} rows, {m.ids} ids, vocabulary {m.vocabulary}, expected each number below 2^31")
    digest = _digest(m.rows, m.ids, m.vocabulary, m.data)
    if digest != m.digest:
        raise ProtocolError(f"masks of {key}: got digest {digest:08x}, expected {m.digest & 0xFFFFFFFF:08x}")


def decode_masks(masks: EncodedMasks, key: str) -> Masks:
    """Invert `encode_masks`. The size of `masks.data` bounds its allocations.

    Raises:
        ProtocolError: see `check_masks`; or the data does not encode this number of rows and ids.
    """
    check_masks(masks, key)
    try:
        offsets, ids = _C.decode_masks(np.frombuffer(masks.data, np.uint8), masks.rows, masks.ids, masks.vocabulary)
    except ValueError as error:
        raise ProtocolError(f"masks of {key}: {error}") from error
    return Masks(offsets, ids, masks.vocabulary)


def token_outside(masks: Masks, tokens: np.ndarray) -> int | None:
    """Return the first row whose ids do not include its token; None if every row includes its token.

    Args:
        tokens: int32[rows].
    """
    counts = masks.counts
    row_of = np.repeat(np.arange(len(masks)), counts)
    inside = counts == 0
    inside[row_of[masks.ids == tokens[row_of]]] = True
    return None if inside.all() else int(np.argmin(inside))


def _digest(rows: int, ids: int, vocabulary: int, data: Buffer) -> int:
    return crc32c(data, crc32c(struct.pack("<3Q", rows, ids, vocabulary)))
