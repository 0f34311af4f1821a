"""The steps of a sample, for scores of the way to an answer (process rewards).

Every stretch of sampled tokens is a step, or with a separator text several: one for each piece of its text between separators that is
not blank, the same that `[piece for piece in text.split(separator) if piece.strip()]` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

Decode = Callable[[Sequence[int]], str]


def ends(tokens: Sequence[int], sampled: Sequence[bool], separator: str | None, decode: Decode) -> tuple[int, ...]:
    """Index of the last token of each step, ascending.

    Where a separator ends inside a token, that token is the step's last, with whatever it holds of the next. Blank pieces belong to the
    step after them, and at the end of a stretch to the one before, so that the token that ends a response is always a step's last.

    Args:
        separator: None: a stretch is one step.
        decode: text of token ids; that of a part must be a part of the text.
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
    """float32[size] with `scores` at the indices `at`, NaN elsewhere (`Trajectory.rewards`)."""
    rewards = np.full(size, np.nan, np.float32)
    rewards[list(at)] = scores
    return rewards


def _ends(tokens: Sequence[int], separator: str, decode: Decode) -> list[int]:
    """Of one stretch; not empty."""
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
    """The smallest `end` for which tokens[start:end] hold a separator, or the number of tokens. O(n log n) in end - start."""
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
