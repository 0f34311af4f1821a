"""Mathematical equality by the math-verify library. For a process of its own: parsing what a model wrote can take for ever."""

from __future__ import annotations

from math_verify import parse, verify

from asyncmoe.rollout.tasks.jsonl import MARK


def score(prompt: str, response: str, answer: str) -> float:
    """1 when what the response ends with equals the reference, else 0.

    What follows the last "####" counts, or without one the expression math-verify finds last. The library's own time-outs turn a
    slow comparison into False, so they are off; the caller has one.

    Raises:
        ValueError: the reference is no mathematical expression.
    """
    reference = parse(answer, parsing_timeout=None, raise_on_error=True)
    if not reference:
        raise ValueError(f"the reference {answer!r} is no mathematical expression")
    found = parse(response.rpartition(MARK)[2], parsing_timeout=None, raise_on_error=True)
    return float(verify(reference, found, timeout_seconds=None, raise_on_error=True))
