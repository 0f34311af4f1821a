"""Work on long byte strings in C++, without Python's interpreter lock: a long response has megabytes of Base64."""

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


def decode_base64(text: str) -> np.ndarray:
    """Decode the routes of a response while other responses go on; `base64.b64decode` holds the interpreter lock throughout.

    Returns:
        uint8[n].

    Raises:
        ValueError: `text` is not canonical Base64 (RFC 4648, section 4).
    """
    return _C.decode_base64(text)
