"""Tasks: prompts by group number, and demonstrations for the warm-up.

A task depends only on the seed and the number, so a resumed run asks the same questions as an uninterrupted one.
"""

from __future__ import annotations

from asyncmoe.config import Config
from asyncmoe.rollout.tasks.types import Demonstration, Gold, HasGolds, Prompt, Task
from asyncmoe.rollout.tokenizer import Tokenizer

__all__ = ["Demonstration", "Gold", "HasGolds", "Prompt", "Task", "load", "load_evaluation"]


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
