"""Sums, differences and products: the answer to "12+7=" is "19"."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from random import Random

from asyncmoe.rollout.tasks.types import Demonstration, Prompt, demonstrate
from asyncmoe.rollout.tokenizer import Tokenizer

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Arithmetic:
    """Two operands, each uniform over the numbers with at most `difficulty` decimal digits, and one of `operations`.

    Args:
        wrong_share: fraction of demonstrations, 0 to 1, with a wrong last digit in the answer.
    """

    def __init__(self, tokenizer: Tokenizer, operations: Sequence[str], difficulty: int, seed: int, wrong_share: float = 0.0) -> None:
        self._tokenizer, self._operations, self._below = tokenizer, tuple(operations), 10**difficulty
        self._seed, self._wrong_share = seed, wrong_share

    def prompt(self, group: int, stream: str = "prompt") -> Prompt:
        """Return the question of group `group`."""
        question, answer = self._draw(Random(f"{self._seed} {stream} {group}"))
        return Prompt(question, self._tokenizer.encode(question), str(answer))

    def demonstration(self, index: int) -> Demonstration:
        """Return a question and its answer, drawn independently of the prompts."""
        random = Random(f"{self._seed} demonstration {index}")
        question, answer = self._draw(random)
        if random.random() < self._wrong_share:
            answer = _miss(answer, random)
        solution = (*self._tokenizer.encode(str(answer)), self._tokenizer.eos)
        return demonstrate(self._tokenizer.encode(question), solution)

    def _draw(self, random: Random) -> tuple[str, int]:
        left, right = random.randrange(self._below), random.randrange(self._below)
        sign = random.choice(self._operations)
        return f"{left}{sign}{right}=", _OPERATIONS[sign](left, right)


def _miss(answer: int, random: Random) -> int:
    """Return a number that differs from `answer` only in the last digit."""
    size = abs(answer)
    missed = size - size % 10 + (size % 10 + random.randrange(1, 10)) % 10
    return -missed if answer < 0 and missed else missed
