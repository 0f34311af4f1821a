"""The digest of everything a trajectory carries."""

from __future__ import annotations

from asyncmoe.record import _C

Buffer = bytes | bytearray | memoryview


def crc32c(buffer: Buffer, before: int = 0) -> int:
    """CRC-32C (RFC 3720, appendix B.4) of consecutive bytes; `before`: the CRC of what precedes them."""
    return _C.crc32c(buffer, before)
