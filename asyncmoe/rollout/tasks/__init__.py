"""What is asked: prompts by group number, and demonstrations for the warm-up.

A task is a function of the seed and the number alone, so a run that resumes asks what it would have asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from asyncmoe.config import Config
from asyncmoe.rollout.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """One question. `tokens` is what the engine gets, `text` what a scorer sees, `answer` the reference."""

    text: str
    tokens: tuple[int, ...]
    answer: str


@dataclass(frozen=True)
class Demonstration:
    """A solved question. `loss_mask` is True for the tokens of the solution, the end-of-sequence token included."""

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]


class Task(Protocol):
    """A source of questions without end."""

    def prompt(self, group: int, stream: str = "prompt") -> Prompt:
        """The question that all members of group `group` answer; other streams ask other questions under the same numbers."""
        ...

    def demonstration(self, index: int) -> Demonstration:
        """The `index`-th solved question."""
        ...


def demonstrate(prompt: tuple[int, ...], solution: tuple[int, ...]) -> Demonstration:
    """A prompt followed by its solution."""
    return Demonstration(prompt + solution, (False,) * len(prompt) + (True,) * len(solution))


def load(config: Config, tokenizer: Tokenizer) -> Task:
    """The task a configuration names.

    Raises:
        DataError: its data cannot be used.
    """
    from asyncmoe.rollout.tasks.arithmetic import Arithmetic
    from asyncmoe.rollout.tasks.jsonl import JsonlTask

    section, seed = config.task, config.run.seed
    if section.kind == "arithmetic":
        return Arithmetic(tokenizer, section.operations, section.difficulty, seed, config.warmup.wrong_share)
    assert section.path is not None
    return JsonlTask(tokenizer, section.path, section.chat_template, seed)


def load_evaluation(config: Config, tokenizer: Tokenizer, task: Task) -> Task:
    """What evaluation asks: `evaluation.path`, or the task itself.

    Raises:
        DataError: the file cannot be used.
    """
    from asyncmoe.rollout.tasks.jsonl import JsonlTask

    if config.evaluation.path is None:
        return task
    return JsonlTask(tokenizer, config.evaluation.path, config.task.chat_template, config.run.seed, "evaluation.path")
