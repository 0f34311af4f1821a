"""Normalize a scorer's answer: a number, or a reward with metrics, step scores and a reason.

    0.5    {"reward": 0.5}    an object with the attribute reward
    {"reward": 0.5, "metrics": {"format": 1.0}, "steps": [0.2, 0.9], "why": "a wrong sign"}

Any other answer is rejected, including an unknown key: a misspelt "steps" would silently lose the step scores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncmoe import plugins
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.scoring.types import GARBAGE

SHOWN_VALUE = 200
"""Maximum length of a wrong value in an error message, in characters."""
LARGEST_REWARD = 3.4e38
"""Upper bound of rewards, because those of steps are stored as float32."""
MOST_METRICS = 64
"""Maximum metrics of a response."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_PARTS = ("reward", "metrics", "steps", "why")
_WHY = 2000
"""Characters kept of a reason."""


def plain(value: object) -> dict[str, Any]:
    """Normalize an answer to {"reward": number}, with "metrics" (numbers by name), "steps" (numbers) and "why" (text) if it has them.

    Raises:
        TrajectoryRejected: "scorer_garbage": the answer is invalid.
    """
    if isinstance(value, Mapping):
        unknown = [key for key in value if key not in _PARTS]
        if unknown or "reward" not in value:
            got = f"the keys {', '.join(map(str, value)):.{SHOWN_VALUE}}"
            raise garbage(got, "reward, and optionally metrics (other numbers by name), steps and why")
        parts: Mapping[str, Any] = value
    else:
        parts = {name: getattr(value, name, None) for name in _PARTS} if hasattr(value, "reward") else {"reward": value}
    reward, metrics, steps, why = map(parts.get, _PARTS)
    if why is not None and not isinstance(why, str):
        raise garbage(f"why of type {type(why).__name__}", "a text")
    said: dict[str, Any] = {} if why is None else {"why": why[:_WHY]}
    if metrics is not None:
        try:
            said["metrics"] = metrics_of(metrics)
        except ValueError as error:
            raise TrajectoryRejected(GARBAGE, f"the scorer returned {error}") from error
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


def finite(value: object) -> float:
    """Return a user's reward as a float. Raises ValueError, which names the value, if it is not a finite number."""
    if abs(found := number(value)) <= LARGEST_REWARD:
        return found
    raise ValueError(found)


def metrics_of(value: object) -> dict[str, float]:
    """Return a user's metrics as floats, by ascending name.

    Raises:
        ValueError: they are not at most `MOST_METRICS` finite numbers by name; says what was got and expected.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"metrics of type {type(value).__name__}, expected numbers by name")
    if len(value) > MOST_METRICS:
        raise ValueError(f"{len(value)} metrics, expected at most {MOST_METRICS} of a response; return means of them")
    if wrong := [name for name in value if not isinstance(name, str) or not _NAME.fullmatch(name)]:
        expected = "at most 64 letters, digits, '_', '-' and '.', with a letter or '_' first"
        raise ValueError(f"a metric with the name {wrong[0]!r:.{SHOWN_VALUE}}, expected {expected}")
    found = {}
    for name in sorted(value):
        try:
            found[name] = finite(value[name])
        except ValueError as error:
            raise ValueError(f"the metric {name} = {error}, expected a finite number or no such metric") from error
    return found
