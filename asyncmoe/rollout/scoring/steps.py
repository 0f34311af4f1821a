"""Divide a sample into steps, for process rewards.

Each run of sampled tokens is one step. With a separator text, each non-blank piece of the run's text is one step, as in
`[piece for piece in text.split(separator) if piece.strip()]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

Decode = Callable[[Sequence[int]], str]


def ends(tokens: Sequence[int], sampled: Sequence[bool], separator: str | None, decode: Decode) -> tuple[int, ...]:
    """Return the index of the last token of each step, ascending.

    If a separator ends inside a token, that token ends the step, even if it also holds text of the next step. A blank piece belongs to the
    following step, or at the end of a run to the preceding step, so the last token of a response always ends a step.

    Args:
        separator: None: each run is one step.
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


def placed(scores: Sequence[float], at: Sequence[int], size: int) -> np.ndarray:
    """Return float32[size] with `scores` at the indices `at`, NaN elsewhere (`Trajectory.rewards`)."""
    rewards = np.full(size, np.nan, np.float32)
    rewards[list(at)] = scores
    return rewards


def _ends(tokens: Sequence[int], separator: str, decode: Decode) -> list[int]:
    """Return the step ends of one run of sampled tokens, which is not empty."""
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
