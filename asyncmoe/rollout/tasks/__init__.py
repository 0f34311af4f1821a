"""Tasks: prompts by group number, and demonstrations for the warm-up.

A task depends only on the seed and the number, so a resumed run asks the same questions as an uninterrupted one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from asyncmoe.config import Config
from asyncmoe.rollout.tokenizer import Tokenizer


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


def load(config: Config, tokenizer: Tokenizer) -> Task:
    """Build the task that the configuration names.

    Raises:
        DataError: the task's file is unusable.
    """
    from asyncmoe.rollout.tasks.arithmetic import Arithmetic
    from asyncmoe.rollout.tasks.jsonl import JsonlTask

    section, seed = config.task, config.run.seed
    if section.kind == "arithmetic":
        return Arithmetic(tokenizer, section.operations, section.difficulty, seed, config.warmup.wrong_share)
    assert section.path is not None
    return JsonlTask(tokenizer, section.path, section.chat_template, seed)


def load_evaluation(config: Config, tokenizer: Tokenizer, task: Task) -> Task:
    """Build the evaluation task from `evaluation.path`; without a path, return `task`.

    Raises:
        DataError: the file is unusable.
    """
    from asyncmoe.rollout.tasks.jsonl import JsonlTask

    if config.evaluation.path is None:
        return task
    return JsonlTask(tokenizer, config.evaluation.path, config.task.chat_template, config.run.seed, "evaluation.path")
