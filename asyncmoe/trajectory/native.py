"""C++ work on long byte strings, without Python's interpreter lock."""

from __future__ import annotations

from asyncmoe.trajectory import _C

Buffer = bytes | bytearray | memoryview


def crc32c(buffer: Buffer, before: int = 0) -> int:
    """Return the CRC-32C (RFC 3720, appendix B.4) of consecutive bytes, the digest that protects a trajectory's data.

    Args:
        before: CRC of the preceding bytes.
    """
    return _C.crc32c(buffer, before)
