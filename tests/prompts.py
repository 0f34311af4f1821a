"""Tasks as a run makes them, for tests that need prompts and no configuration."""

from __future__ import annotations

from pathlib import Path

from asyncmoe.rollout.tasks.arithmetic import Arithmetic
from asyncmoe.rollout.tasks.encode import Encoder
from asyncmoe.rollout.tasks.jsonl import read
from asyncmoe.rollout.tasks.order import DrawnTask, ListedTask, TaskPart
from asyncmoe.rollout.tokenizer import Tokenizer


def arithmetic(tokenizer: Tokenizer, operations: tuple[str, ...], difficulty: int, seed: int, wrong_share: float = 0.0) -> DrawnTask:
    return DrawnTask(Arithmetic(operations, difficulty, wrong_share), Encoder(tokenizer, chat=False), seed, "arithmetic")


def jsonl(tokenizer: Tokenizer, path: Path, *, chat_template: bool, seed: int, system: str | None = None) -> ListedTask:
    encoder = Encoder(tokenizer, chat=chat_template, system=system, ending="\n")
    return ListedTask(TaskPart(read(path), f"task.path {path}"), encoder, seed)
