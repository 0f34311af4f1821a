"""Base64 decoding of routes: a long response has megabytes of Base64, and decoding it must not block other responses."""

from __future__ import annotations

import numpy as np

from asyncmoe.trajectory import _C


def decode_base64(text: str) -> np.ndarray:
    """Decode in C++ without Python's interpreter lock, which `base64.b64decode` holds throughout.

    Returns:
        uint8[n].

    Raises:
        ValueError: `text` is not canonical Base64 (RFC 4648, section 4).
    """
    return _C.decode_base64(text)
