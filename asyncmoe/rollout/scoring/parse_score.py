"""Parse a scorer's answer: a number, or a reward with step scores.

    0.5    {"reward": 0.5}    {"reward": 0.5, "steps": [0.2, 0.9]}    an object with these as attributes

Any other answer is rejected, including an unknown key: a misspelt "steps" would silently lose the step scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.scoring.steps import Decode, ends, placed
from asyncmoe.rollout.scoring.types import GARBAGE, NAN, Sample, Score

_SHOWN = 200


def plain(value: object) -> dict[str, Any]:
    """Normalize an answer to {"reward": number} or {"reward": number, "steps": [numbers]}. Accepts NumPy and torch numbers.

    Raises:
        TrajectoryRejected: "scorer_garbage": the answer is invalid.
    """
    if isinstance(value, Mapping):
        unknown = [key for key in value if key not in ("reward", "steps")]
        if unknown or "reward" not in value:
            raise _garbage(f"the keys {[*value]}", '"reward" and optionally "steps"')
        reward, steps = value["reward"], value.get("steps")
    elif hasattr(value, "reward"):
        reward, steps = value.reward, getattr(value, "steps", None)
    else:
        reward, steps = value, None
    if steps is None:
        return {"reward": _number(reward)}
    listed = steps.tolist() if hasattr(steps, "tolist") else steps
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
        raise _garbage(f"steps of type {type(steps).__name__}", "a list of numbers")
    return {"reward": _number(reward), "steps": [_number(step) for step in listed]}


def read(value: object, sample: Sample, separator: str | None, decode: Decode) -> Score:
    """Convert an answer to the score of `sample`.

    Raises:
        TrajectoryRejected: "scorer_garbage": the answer is invalid, or its number of step scores differs from the sample's number of
            steps; "scorer_nan": a score is not finite.
    """
    answer = plain(value)
    reward, steps = _finite(answer["reward"]), answer.get("steps")
    if steps is None:
        return Score(reward)
    at = ends(sample.tokens, sample.sampled, separator, decode)
    if len(steps) != len(at):
        raise _garbage(f"scores of {len(steps)} steps", f"{len(at)}, the steps of this sample (scoring.step_separator {separator!r})")
    return Score(reward, rewards=placed([_finite(step) for step in steps], at, len(sample.tokens)))


def read_json(body: object, sample: Sample, separator: str | None, decode: Decode) -> Score:
    """Convert the bytes of a JSON answer to the score of `sample`. Raises as `read`; JSON has no NaN, so NaN is garbage."""
    data = cast(bytes, body)
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _garbage(f"{data[:_SHOWN]!r} ({error})", "JSON") from error
    if not isinstance(value, dict):
        raise _garbage(f"{data[:_SHOWN]!r}", 'a JSON object with a "reward"')
    return read(value, sample, separator, decode)


Read = Callable[[object, Sample], Score]


def _number(value: object) -> int | float:
    item = getattr(value, "item", None)
    try:
        found = item() if callable(item) else value
    # NumPy and torch raise different errors for an array of several elements.
    except (ValueError, RuntimeError) as error:
        raise _garbage(f"{type(value).__name__}: {error}", "a number") from error
    if not isinstance(found, int | float):
        raise _garbage(f"{type(found).__name__} {str(found)[:_SHOWN]!r}", "a number")
    return found


def _finite(value: int | float) -> float:
    try:
        found = float(value)
    except OverflowError as error:
        raise _garbage(f"an integer of {value.bit_length()} bits" if isinstance(value, int) else "a number", "a float") from error
    # Step scores are stored as float32.
    if not math.isfinite(found) or abs(found) > 3.4e38:
        raise TrajectoryRejected(NAN, f"the scorer returned {found}, expected a finite number")
    return found


def _garbage(got: str, expected: str) -> TrajectoryRejected:
    return TrajectoryRejected(GARBAGE, f"the scorer returned {got}, expected {expected}")
