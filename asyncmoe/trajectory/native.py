"""Work on long byte strings in C++, without Python's interpreter lock."""

from __future__ import annotations

import numpy as np

from asyncmoe.trajectory import _C

Buffer = bytes | bytearray | memoryview


def crc32c(buffer: Buffer, before: int = 0) -> int:
    """Return the CRC-32C (RFC 3720, appendix B.4) of consecutive bytes, the digest that protects a trajectory's data.

    Args:
        before: CRC of the preceding bytes.
    """
    return _C.crc32c(buffer, before)


def read_ints(text: Buffer) -> np.ndarray | None:
    """Read whole numbers in JSON, like "[1, -2]", as int32[n]; None if the text is anything else, or a number has more than 32 bits."""
    return _C.read_ints(text)


def read_floats(text: Buffer) -> np.ndarray | None:
    """Read numbers in JSON, like "[-0.5, 1e-05]", as float32[n]: each rounded to a double first, as Python reads it.

    None if the text is anything else, or a number has neither a fraction nor an exponent or is no finite float32.
    """
    return _C.read_floats(text)


def read_entries(text: Buffer) -> tuple[np.ndarray, np.ndarray] | None:
    """Read log-probabilities and tokens in JSON, like "[[-0.5, 17, null]]", as float32[n] and int32[n]; None if it is anything else."""
    return _C.read_entries(text)


def read_lists(text: Buffer) -> tuple[np.ndarray, np.ndarray] | None:
    """Read lists of whole numbers in JSON, like "[[3, 1], []]": int32[n], their lengths, and int32[m], all numbers; None if it is not."""
    return _C.read_lists(text)


def read_base64(text: Buffer) -> bytes | None:
    """Read bytes in JSON, base64 in quotation marks; None if the text is anything else, or has escapes."""
    return _C.read_base64(text)
