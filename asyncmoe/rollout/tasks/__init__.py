"""Tasks: prompts by group number, demonstrations for the warm-up, and the question sets of the evaluation.

A task depends only on the seed and the number, so a resumed run asks the same questions as an uninterrupted one. `types` has the protocol
of a user's own task.
"""

from __future__ import annotations

from asyncmoe.rollout.tasks.load import EvaluationQuestions, Tasks, load
from asyncmoe.rollout.tasks.types import Demonstration, Example, HasGolds, Prompt, Task

__all__ = [
    "Demonstration",
    "EvaluationQuestions",
    "Example",
    "HasGolds",
    "Prompt",
    "Task",
    "Tasks",
    "load",
]
