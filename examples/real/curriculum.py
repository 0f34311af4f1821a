"""A curriculum: sums whose lengths are asked the more often, the less it is settled whether the model passes them.

A group whose responses all pass, or all fail, teaches nothing. The scorer runs in a rollout worker and the task in the controller, on one
machine, so the scorer writes how each response did to a file, which the task reads. That bends what a task promises (docs/guides/task.md):
prompts depend on the order in which groups end, so a run that is resumed asks others than an uninterrupted one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from asyncmoe.rollout.tasks import Example
from examples.real.tasks import number

NOTES = Path("runs", "curriculum-passed.txt")
"""A line for each response: the digits of its sum, and 1 if it passed. Delete it before another run."""
MEMORY, FLOOR = 0.98, 0.1


def chance(failed: float, passed: float) -> float:
    """Return the relative frequency of sums: 1 if half of the responses pass, `FLOOR` if all or none do.

    p (1 - p) is the learnability of a prompt that passes with probability p (Foster et al. 2025, arXiv:2502.12272).
    """
    rate = passed / (failed + passed)
    return FLOOR + (1 - FLOOR) * 4 * rate * (1 - rate)


class Sums:
    """Endless: sums of two numbers of 1 to `most` digits; for an evaluation, whose questions must stay the same, not `measured`."""

    def __init__(self, most: int = 3, measured: bool = True) -> None:
        self._lengths, self._measured, self._read = range(1, most + 1), measured, 0
        self._passed: dict[int, list[float]] = defaultdict(lambda: [1.0, 1.0])
        """By digits, how many responses have failed and passed; earlier ones count less, because the policy changes."""

    def draw(self, random: Random) -> Example:
        """Return a sum. Its length is in the columns if the scorer is to note it."""
        if self._measured:
            self._measure()
        (digits,) = random.choices(self._lengths, [chance(*self._passed[one]) if self._measured else 1.0 for one in self._lengths])
        left, right = (random.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        messages = [{"role": "system", "content": "Answer with one number."}, {"role": "user", "content": f"What is {left} + {right}?"}]
        return Example(messages, str(left + right), {"digits": digits} if self._measured else {})

    def _measure(self) -> None:
        lines = NOTES.read_text().splitlines() if NOTES.exists() else []
        for digits, reward in (map(int, line.split()) for line in lines[self._read :]):
            self._passed[digits] = [MEMORY * count for count in self._passed[digits]]
            self._passed[digits][reward] += 1
        self._read = len(lines)


async def score(prompt: str, response: str, answer: str, columns: Mapping[str, Any]) -> float:
    """Return 1 if the last number of the response is the answer, and note it."""
    reward = number(prompt, response, answer)
    if (digits := columns.get("digits")) is not None:
        with NOTES.open("a") as file:
            file.write(f"{digits} {int(reward)}\n")
    return reward
