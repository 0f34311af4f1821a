"""Reads JSON that a model or a client wrote."""

from __future__ import annotations

import json
from typing import Any


def read(text: str | bytes) -> Any:
    """Return the value of JSON text.

    Raises:
        ValueError: the text is not JSON, or no other program can be told its value: it is nested too deeply, or has half a surrogate pair
            or a number that is not finite.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError(str(error)) from error
    return value
