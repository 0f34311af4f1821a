"""Normalize a scorer's answer: a number, or a reward with step scores and a reason.

    0.5    {"reward": 0.5}    {"reward": 0.5, "steps": [0.2, 0.9], "why": "a wrong sign"}    an object with these as attributes

Any other answer is rejected, including an unknown key: a misspelt "steps" would silently lose the step scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncmoe import plugins
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.scoring.types import GARBAGE

SHOWN_VALUE = 200
"""Maximum length of a wrong value in an error message, in characters."""
_WHY = 2000
"""Characters kept of a reason."""


def plain(value: object) -> dict[str, Any]:
    """Normalize an answer to {"reward": number}, with "steps" (numbers) and "why" (text) if it has them.

    Raises:
        TrajectoryRejected: "scorer_garbage": the answer is invalid.
    """
    if isinstance(value, Mapping):
        unknown = [key for key in value if key not in ("reward", "steps", "why")]
        if unknown or "reward" not in value:
            raise garbage(f"the keys {[*value]}", '"reward" and optionally "steps" and "why"')
        reward, steps, why = value["reward"], value.get("steps"), value.get("why")
    elif hasattr(value, "reward"):
        reward, steps, why = value.reward, getattr(value, "steps", None), getattr(value, "why", None)
    else:
        reward, steps, why = value, None, None
    if why is not None and not isinstance(why, str):
        raise garbage(f"why of type {type(why).__name__}", "a text")
    said = {} if why is None else {"why": why[:_WHY]}
    if steps is None:
        return {"reward": _worth(reward), **said}
    listed = steps.tolist() if hasattr(steps, "tolist") else steps
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
        raise garbage(f"steps of type {type(steps).__name__}", "a list of numbers")
    return {"reward": _worth(reward), "steps": [_worth(step) for step in listed], **said}


def garbage(got: str, expected: str) -> TrajectoryRejected:
    """Return the error for an invalid answer."""
    return TrajectoryRejected(GARBAGE, f"the scorer returned {got}, expected {expected}")


def _worth(value: object) -> float:
    try:
        return number(value)
    except ValueError as error:
        raise garbage(str(error), "a number") from error


def number(value: Any) -> float:
    """Return a user's reward as a float: a number of Python, NumPy or torch, also alone in an array, a Fraction or a Decimal.

    Raises:
        ValueError: it is not a number (text never is); says what it is.
    """
    shown = ""
    try:
        found = value.item() if callable(getattr(value, "item", None)) else value
        shown = f"{found!r:.{SHOWN_VALUE}}"
        if not isinstance(found, str | bytes | bytearray):
            return float(found)
    except BaseException as error:  # noqa: BLE001  too large, several numbers, nothing, or what a user's class raises
        shown = shown or f"({plugins.told(error)})"
    raise ValueError(f"{type(value).__name__} {shown}")
