"""Reads JSON that a model wrote."""

from __future__ import annotations

import json
from typing import Any


def read(text: str) -> Any:
    """Return the value of JSON text.

    Raises:
        ValueError: the text is not JSON, or no other program can be told its value: it is nested too deeply, or has half a surrogate pair
            or a number that is not finite.
    """
    try:
        return checked(json.loads(text, parse_constant=_no_number))
    except RecursionError as error:
        raise ValueError(str(error)) from error


def checked(value: Any) -> Any:
    """Return the value. Raises ValueError as `read`."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError(str(error)) from error
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number in JSON")
