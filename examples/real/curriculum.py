"""A curriculum: sums whose lengths are asked the more often, the less it is settled whether the model passes them.

A group whose responses all pass, or all fail, teaches nothing. The scorer is a coroutine function, so it runs in the controller's process,
as the task does, and both share PASSED. That bends what a task promises (docs/guides/task.md): prompts depend on the order in which groups
end, so a run that is resumed measures anew and asks others than an uninterrupted one. It needs `rollout.workers: 0`, the default.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from random import Random
from typing import Any

from asyncmoe.rollout.tasks import Example
from examples.real.tasks import number

PASSED: dict[int, list[float]] = defaultdict(lambda: [1.0, 1.0])
"""By digits, how many responses have failed and passed; earlier ones count less, because the policy changes. It begins at one of each."""
MEMORY, FLOOR = 0.98, 0.1


def chance(digits: int) -> float:
    """Return the relative frequency of sums: 1 if half of the responses pass, `FLOOR` if all or none do.

    p (1 - p) is the learnability of a prompt that passes with probability p (Foster et al. 2025, arXiv:2502.12272).
    """
    failed, passed = PASSED[digits]
    rate = passed / (failed + passed)
    return FLOOR + (1 - FLOOR) * 4 * rate * (1 - rate)


class Sums:
    """Endless: sums of two numbers of 1 to `most` digits; for an evaluation, whose questions must stay the same, not `measured`."""

    def __init__(self, most: int = 3, measured: bool = True) -> None:
        self._lengths, self._measured = range(1, most + 1), measured

    def draw(self, random: Random) -> Example:
        """Return a sum. Its length is in the columns if the scorer is to note it."""
        (digits,) = random.choices(self._lengths, [chance(one) if self._measured else 1.0 for one in self._lengths])
        left, right = (random.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        messages = [{"role": "system", "content": "Answer with one number."}, {"role": "user", "content": f"What is {left} + {right}?"}]
        return Example(messages, str(left + right), {"digits": digits} if self._measured else {})


async def score(prompt: str, response: str, answer: str, columns: Mapping[str, Any]) -> float:
    """Return 1 if the last number of the response is the answer, and note it."""
    reward = number(prompt, response, answer)
    if (digits := columns.get("digits")) is not None:
        PASSED[digits] = [MEMORY * count for count in PASSED[digits]]
        PASSED[digits][int(reward)] += 1
    return reward
