"""Questions of a task."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


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


@dataclass(frozen=True)
class Gold:
    """A reference answer of a task. `where` names its file and line, for messages."""

    where: str
    answer: str


@runtime_checkable
class HasGolds(Protocol):
    """A task whose reference answers are known before the run, so that they can be checked before engines start."""

    def golds(self) -> Iterable[Gold]:
        """Return the reference answers of all questions, in the order of the file."""
        ...


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
