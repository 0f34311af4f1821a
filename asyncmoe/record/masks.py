"""The vocabulary ids every token was sampled from, as compressed sparse rows."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from asyncmoe.errors import ProtocolError, TrajectoryRejected
from asyncmoe.record import _C
from asyncmoe.record.checksum import crc32c

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, eq=False)
class Masks:
    """Rows of ids: row t is `ids[offsets[t] : offsets[t + 1]]`.

    Attributes:
        offsets: int32[rows + 1].
        ids: int32[n], ascending within a row. A row without ids is the whole vocabulary: a token is always sampled from something.
        vocabulary: ids are smaller.
    """

    offsets: np.ndarray
    ids: np.ndarray
    vocabulary: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> np.ndarray:
        """int32[rows]; 0 where the row is the whole vocabulary."""
        counts: np.ndarray = np.diff(self.offsets)
        return counts


@dataclass(frozen=True)
class EncodedMasks:
    """Masks as bytes; the format is defined in csrc/record/masks.h.

    Attributes:
        rows: of the masks.
        ids: in all rows together.
        vocabulary: ids are smaller.
        digest: a CRC-32C of the numbers above and the bytes.
        data: the bytes.
    """

    rows: int
    ids: int
    vocabulary: int
    digest: int
    data: Buffer


def encode_masks(masks: Masks, key: str) -> EncodedMasks:
    """Pack masks, in fixed width or as gaps, whichever is smaller.

    Args:
        key: the trajectory's name, for errors.

    Raises:
        TrajectoryRejected: "bad_mask": ids that do not ascend, or are not of the vocabulary; offsets that do not fit.
    """
    try:
        made = _C.encode_masks(masks.offsets, masks.ids, masks.vocabulary)
    except (ValueError, TypeError) as error:  # TypeError: another dtype, with the signature that was expected
        raise TrajectoryRejected("bad_mask", f"{key}: {error}") from error
    data = memoryview(made.data).toreadonly()
    rows, ids = len(masks), len(masks.ids)
    return EncodedMasks(rows, ids, masks.vocabulary, _digest(rows, ids, masks.vocabulary, data), data)


def check_masks(masks: EncodedMasks, key: str) -> None:
    """Refuse what was damaged on its way, without allocating anything.

    Raises:
        ProtocolError: numbers out of bounds, or a digest that disagrees.
    """
    m = masks
    if not (0 <= m.rows < (1 << 31) - 1 and 0 <= m.ids < 1 << 31 and 1 <= m.vocabulary < 1 << 31):
        raise ProtocolError(f"masks of {key}: got {m.rows} rows of {m.ids} ids of a vocabulary of {m.vocabulary}, each below 2^31")
    digest = _digest(m.rows, m.ids, m.vocabulary, m.data)
    if digest != m.digest:
        raise ProtocolError(f"masks of {key}: got digest {digest:08x}, expected {m.digest & 0xFFFFFFFF:08x}")


def decode_masks(masks: EncodedMasks, key: str) -> Masks:
    """The inverse of `encode_masks`. What it allocates is bounded by the size of `masks.data`.

    Raises:
        ProtocolError: see `check_masks`; or bytes that are no masks of so many rows and ids.
    """
    check_masks(masks, key)
    try:
        offsets, ids = _C.decode_masks(np.frombuffer(masks.data, np.uint8), masks.rows, masks.ids, masks.vocabulary)
    except ValueError as error:
        raise ProtocolError(f"masks of {key}: {error}") from error
    return Masks(offsets, ids, masks.vocabulary)


def token_outside(masks: Masks, tokens: np.ndarray) -> int | None:
    """The first row whose ids do not include its token; None when there is none.

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
