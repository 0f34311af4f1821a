"""Mathematical equality by the math-verify library. Runs in its own process, because parsing model output may never return."""

from __future__ import annotations

from math_verify import parse, verify

from asyncmoe.rollout.tasks.jsonl import MARK


def score(prompt: str, response: str, answer: str) -> float:
    """Return 1 if the final answer of the response equals the reference, else 0.

    The final answer is the text after the last "####", or without one the last expression that math-verify finds. The library's own
    timeouts turn a slow comparison into False, so they are off; the caller enforces a timeout.

    Raises:
        ValueError: the reference is not a mathematical expression.
    """
    reference = parse(answer, parsing_timeout=None, raise_on_error=True)
    if not reference:
        raise ValueError(f"the reference {answer!r} is no mathematical expression")
    found = parse(response.rpartition(MARK)[2], parsing_timeout=None, raise_on_error=True)
    return float(verify(reference, found, timeout_seconds=None, raise_on_error=True))
