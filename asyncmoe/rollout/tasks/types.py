"""Questions of a task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Prompt:
    """One question. The engine receives `tokens`, the scorer `text`; `answer` is the reference."""

    text: str
    tokens: tuple[int, ...]
    answer: str


@dataclass(frozen=True)
class Demonstration:
    """A solved question. `loss_mask` is True for the tokens of the solution, including the end-of-sequence token."""

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]


class Task(Protocol):
    """An endless source of questions."""

    def prompt(self, group: int, stream: str = "prompt") -> Prompt:
        """Return the question of all members of group `group`. Each stream has its own questions for the same numbers."""
        ...

    def demonstration(self, index: int) -> Demonstration:
        """Return the `index`-th solved question."""
        ...


def demonstrate(prompt: tuple[int, ...], solution: tuple[int, ...]) -> Demonstration:
    """Join a prompt and its solution."""
    return Demonstration(prompt + solution, (False,) * len(prompt) + (True,) * len(solution))
