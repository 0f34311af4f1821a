"""Base64, as engines send routes: megabytes of it for a long response, and other responses must not wait for its decoding."""

from __future__ import annotations

import numpy as np

from asyncmoe.record import _C


def decode_base64(text: str) -> np.ndarray:
    """Decode in C++ and without Python's lock, which `base64.b64decode` holds for as long as it takes.

    Returns:
        uint8[n].

    Raises:
        ValueError: what RFC 4648, section 4, would not have encoded so.
    """
    return _C.decode_base64(text)
