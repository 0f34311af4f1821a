"""Normalize a scorer's answer: a number, or a reward with step scores and a reason.

    0.5    {"reward": 0.5}    {"reward": 0.5, "steps": [0.2, 0.9], "why": "a wrong sign"}    an object with these as attributes

Any other answer is rejected, including an unknown key: a misspelt "steps" would silently lose the step scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.scoring.types import GARBAGE

SHOWN_VALUE = 200
"""Maximum length of a wrong value in an error message, in characters."""
_WHY = 2000
"""Characters kept of a reason."""


def plain(value: object) -> dict[str, Any]:
    """Normalize an answer to {"reward": number}, with "steps" (numbers) and "why" (text) if it has them. Accepts NumPy and torch numbers.

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
        return {"reward": _number(reward), **said}
    listed = steps.tolist() if hasattr(steps, "tolist") else steps
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
        raise garbage(f"steps of type {type(steps).__name__}", "a list of numbers")
    return {"reward": _number(reward), "steps": [_number(step) for step in listed], **said}


def garbage(got: str, expected: str) -> TrajectoryRejected:
    """Return the error for an invalid answer."""
    return TrajectoryRejected(GARBAGE, f"the scorer returned {got}, expected {expected}")


def _number(value: object) -> int | float:
    item = getattr(value, "item", None)
    try:
        found = item() if callable(item) else value
    # NumPy and torch raise different errors for an array of several elements.
    except (ValueError, RuntimeError) as error:
        raise garbage(f"{type(value).__name__}: {error}", "a number") from error
    if not isinstance(found, int | float):
        raise garbage(f"{type(found).__name__} {str(found)[:SHOWN_VALUE]!r}", "a number")
    return found
