"""Tasks: prompts by group number, demonstrations for the warm-up, and the question sets of the evaluation.

A task depends only on the seed and the number, so a resumed run asks the same questions as an uninterrupted one. `types` has the protocol
of a user's own task.
"""

from __future__ import annotations

from asyncmoe.rollout.tasks.load import EvaluationQuestions, Tasks, load
from asyncmoe.rollout.tasks.types import Demonstration, Endless, Example, Finite, HasGolds, Message, Prompt, Task

__all__ = [
    "Demonstration",
    "Endless",
    "EvaluationQuestions",
    "Example",
    "Finite",
    "HasGolds",
    "Message",
    "Prompt",
    "Task",
    "Tasks",
    "load",
]
