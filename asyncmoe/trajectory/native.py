"""C++ work on long byte strings, without Python's interpreter lock."""

from __future__ import annotations

from asyncmoe.trajectory import _C

Buffer = bytes | bytearray | memoryview

crc32c = _C.crc32c
"""Returns the CRC-32C (RFC 3720, appendix B.4) of consecutive bytes, the digest that protects a trajectory's data; given the CRC of the
preceding bytes, that of all together."""
