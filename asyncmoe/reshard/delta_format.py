"""The frame of a delta message: a header that says what the payload applies to, the payload (csrc/delta_code.h), and a digest of both."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError
from asyncmoe.reshard.layout import whole_number

_MAGIC = b"amdelta1"
_HEADER = struct.Struct("<8sQIIQQQQQ")
_TRAILER = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size
TRAILER_BYTES = _TRAILER.size
FRAME_BYTES = HEADER_BYTES + TRAILER_BYTES
"""Bytes of a message besides its payload."""


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """What a delta message is.

    Attributes:
        lane: identity of the lane.
        number, messages: position of the message in its lane, and how many the lane has.
        base, version: the version that the message changes, and the one it makes of it.
        before, after: the sum of the terms (`asyncmoe.reshard.delta_digest`) of all elements that the dense message has, in both versions.
        payload: bytes.
    """

    lane: int
    number: int
    messages: int
    base: int
    version: int
    before: int
    after: int
    payload: int


def check_version(version: int) -> None:
    """Raise LayoutError unless a version fits the header."""
    whole_number(version, "version of a delta", 0, (1 << 64) - 1)


def byte_row(message: object) -> np.ndarray:
    """Return a message as contiguous uint8[n], a copy only if it is not; raise LayoutError unless it is an array of uint8."""
    if not isinstance(message, np.ndarray) or message.dtype != np.uint8:
        got = f"an array of {message.dtype}" if isinstance(message, np.ndarray) else type(message).__name__
        raise LayoutError(
            "message of a delta", got=got, expected="an array of uint8", hint="np.frombuffer(..., np.uint8) makes one of bytes"
        )
    return np.ascontiguousarray(message).reshape(-1)


def seal(frame: np.ndarray, header: DeltaHeader) -> np.ndarray:
    """Write header and digest around the payload that lies in `frame`, uint8[FRAME_BYTES + header.payload]; return it."""
    end = HEADER_BYTES + header.payload
    fields = (header.lane, header.number, header.messages, header.base, header.version, header.before, header.after, header.payload)
    _HEADER.pack_into(frame.data, 0, _MAGIC, *fields)
    _TRAILER.pack_into(frame.data, end, _C.digest(frame.ctypes.data, end, 0))
    return frame


def read_header(message: np.ndarray) -> DeltaHeader | str:
    """Return the header of a message, uint8[n], of which at least the first `HEADER_BYTES` are there; else what is wrong."""
    if len(message) < HEADER_BYTES:
        return f"got {len(message)} bytes, expected a header of {HEADER_BYTES}"
    magic, *fields = _HEADER.unpack_from(message.data)
    if magic != _MAGIC:
        return f"got {magic!r} at its beginning, expected {_MAGIC!r}"
    return DeltaHeader(*fields)


def frame_fault(message: np.ndarray, header: DeltaHeader) -> str | None:
    """Return what is wrong with the length or the digest of a whole message, uint8[n], or None."""
    expected = FRAME_BYTES + header.payload
    if len(message) != expected:
        return f"got {len(message)} bytes, expected {expected}"
    end = len(message) - TRAILER_BYTES
    if _TRAILER.unpack_from(message.data, end)[0] != _C.digest(message.ctypes.data, end, 0):
        return "it arrived with another digest than it was sent with"
    return None
