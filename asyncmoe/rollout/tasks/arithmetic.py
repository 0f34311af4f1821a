"""Sums, differences and products: the answer to "12+7=" is "19"."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from random import Random

from asyncmoe.rollout.tasks.types import Example

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Arithmetic:
    """Two operands, each uniform over the numbers with at most `difficulty` decimal digits, and one of `operations`. See `Endless`.

    Args:
        wrong_share: fraction of solutions, 0 to 1, with a wrong last digit.
    """

    def __init__(self, operations: Sequence[str], difficulty: int, wrong_share: float = 0.0) -> None:
        self._operations, self._below, self._wrong_share = tuple(operations), 10**difficulty, wrong_share

    def draw(self, random: Random) -> Example:
        """Return a question; its answer is right, its solution perhaps not."""
        left, right = random.randrange(self._below), random.randrange(self._below)
        sign = random.choice(self._operations)
        answer = solution = _OPERATIONS[sign](left, right)
        if random.random() < self._wrong_share:
            solution = _miss(answer, random)
        return Example(f"{left}{sign}{right}=", str(answer), solution=str(solution))


def _miss(answer: int, random: Random) -> int:
    """Return a number that differs from `answer` only in the last digit."""
    size = abs(answer)
    missed = size - size % 10 + (size % 10 + random.randrange(1, 10)) % 10
    return -missed if answer < 0 and missed else missed
