"""Convert a scorer's answer (`asyncmoe.rollout.scoring.plain_answer`) to the score of a sample.

Each unbroken stretch of sampled tokens is one step. With a separator text, each non-blank piece of the stretch's text is one step, as in
`[piece for piece in text.split(separator) if piece.strip()]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import cast

import msgspec

from asyncmoe import plugins
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.episodes.trajectory_builder import step_rewards
from asyncmoe.rollout.scoring.plain_answer import LARGEST_REWARD, SHOWN_VALUE, garbage, plain
from asyncmoe.rollout.scoring.types import NAN, Sample, Score

Decode = Callable[[Sequence[int]], str]
"""Converts token ids to text."""
Read = Callable[[object, Sample], Score]
"""Converts the raw answer for a sample to its score; raises as `read`."""


def read(value: object, sample: Sample, separator: str | None, decode: Decode) -> Score:
    """Convert an answer to the score of `sample`.

    Raises:
        TrajectoryRejected: "scorer_garbage": the answer is invalid, or its number of step scores differs from the sample's number of
            steps; "scorer_nan": a score is not finite.
    """
    try:
        answer = plain(value)
    except TrajectoryRejected:
        raise
    except BaseException as error:
        raise garbage(f"{type(value).__name__}, which raised {plugins.told(error)}", "a number") from error
    steps = answer.get("steps")
    score = Score(_finite(answer["reward"]), why=answer.get("why", ""), metrics=answer.get("metrics", {}))
    if steps is None:
        return score
    at = ends(sample.tokens, sample.sampled, separator, decode)
    if len(steps) != len(at):
        raise garbage(f"scores of {len(steps)} steps", f"{len(at)}, one per step of this sample (scoring.step_separator {separator!r})")
    credits = dict(zip(at, map(_finite, steps), strict=True))
    return replace(score, rewards=step_rewards(credits, len(sample.tokens)))


def read_json(body: object, sample: Sample, separator: str | None, decode: Decode) -> Score:
    """Convert the bytes of a JSON answer to the score of `sample`. Raises as `read`; JSON has no NaN, so NaN is garbage."""
    data = cast(bytes, body)
    try:
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise garbage(f"{data[:SHOWN_VALUE]!r} ({error})", "JSON") from error
    if not isinstance(value, dict):
        raise garbage(f"{data[:SHOWN_VALUE]!r}", 'a JSON object with a "reward"')
    return read(value, sample, separator, decode)


def ends(tokens: Sequence[int], sampled: Sequence[bool], separator: str | None, decode: Decode) -> tuple[int, ...]:
    """Return the index of the last token of each step, ascending.

    If a separator ends inside a token, that token ends the step, even if it also holds text of the next step. A blank piece belongs to the
    following step, or at the end of a stretch to the preceding step, so the last token of a response always ends a step.

    Args:
        separator: text that ends a step; None: each stretch is one step.
        decode: converts token ids to text; the text of a part of the tokens must be a part of the whole text.
    """
    found: list[int] = []
    place = 0
    for mine, run in groupby(sampled):
        size = sum(1 for _ in run)
        if mine:
            stretch = tokens[place : place + size]
            found += [place + i for i in ([size - 1] if separator is None else _ends(stretch, separator, decode))]
        place += size
    return tuple(found)


def _finite(value: float) -> float:
    if not abs(value) <= LARGEST_REWARD:
        raise TrajectoryRejected(NAN, f"the scorer returned {value}, expected a finite number")
    return value


def _ends(tokens: Sequence[int], separator: str, decode: Decode) -> list[int]:
    """Return the step ends of one stretch of sampled tokens, which is not empty."""
    found: list[int] = []
    start, text = 0, ""
    while start < len(tokens):
        end = _completed(tokens, start, separator, decode)
        text += decode(tokens[start:end])
        if end < len(tokens) and not _blank(text, separator):
            found.append(end - 1)
            text = ""
        start = end
    if found and _blank(text, separator):
        found.pop()
    return [*found, len(tokens) - 1]


def _blank(text: str, separator: str) -> bool:
    return not text.replace(separator, "").strip()


def _completed(tokens: Sequence[int], start: int, separator: str, decode: Decode) -> int:
    """Return the smallest `end` for which tokens[start:end] contain a separator, else len(tokens). O(n log n) in end - start."""
    window = 8
    while separator not in decode(tokens[start : start + window]):
        if start + window >= len(tokens):
            return len(tokens)
        window *= 2
    low, high = start, min(start + window, len(tokens))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if separator in decode(tokens[start:middle]) else (middle, high)
    return high
