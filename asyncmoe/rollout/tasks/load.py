"""The tasks of a run: the training task and the evaluation sets that the configuration names, read, checked and tried."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from asyncmoe.config import Config
from asyncmoe.config.evaluation import EvaluationSet
from asyncmoe.config.task import READ, TaskSection, WeightedSource
from asyncmoe.errors import DataError
from asyncmoe.rollout.tasks import datasets_reader, jsonl, own
from asyncmoe.rollout.tasks.arithmetic import Arithmetic
from asyncmoe.rollout.tasks.encode import Encoder
from asyncmoe.rollout.tasks.held_out import divide, identities
from asyncmoe.rollout.tasks.order import EVALUATION, DrawnTask, ListedTask, MixedTask, TaskPart
from asyncmoe.rollout.tasks.rows import keeps
from asyncmoe.rollout.tasks.types import Finite, Prompt, Task
from asyncmoe.rollout.tokenizer import Tokenizer


@dataclass(frozen=True)
class EvaluationQuestions:
    """An evaluation set. Its questions are the prompts 0 to `count` - 1 of `task` in the stream `EVALUATION`.

    Attributes:
        name: "" if the configuration has no `evaluation.sets`.
        section: samples and sampling.
    """

    name: str
    task: Task
    count: int
    section: EvaluationSet


@dataclass(frozen=True)
class Tasks:
    """All tasks of a run, and the tokenizer that encodes them; `sets` is empty without evaluation."""

    tokenizer: Tokenizer
    training: Task
    sets: tuple[EvaluationQuestions, ...]


def load(config: Config, tokenizer: Tokenizer) -> Tasks:
    """Read the training task and, unless `evaluation.every` is 0, the evaluation sets, and try the first prompt of each.

    Raises:
        ConfigError: a class or function of the user's cannot be loaded, or a package is missing.
        DataError: a source is unusable or too small, or its first prompt leaves no room for a response; names file and line, or row, and
            column.
    """
    seed = config.run.seed
    parts = _open(config.task, "task", config.warmup.wrong_share)
    sets = config.evaluation.every_set if config.evaluation.every else {}
    of_their_own = {name: _open(one.task(config.task), _key(name)) for name, one in sets.items() if not one.held_out}
    held = max((one.prompts or 0 for one in sets.values() if one.held_out), default=0)
    known = [(part.source, part.name) for of_set in of_their_own.values() for part in of_set if isinstance(part.source, Sized)]
    trains = config.run.steps > 0  # `asyncmoe eval` only asks, and may ask every question of the task
    parts = divide(parts, held, frozenset(one for source in known for one in identities(*source) if trains), seed)
    training = _task(config.task, parts, tokenizer, seed)
    _check_room(config, tokenizer, training.prompt(0))
    if config.warmup.steps and config.environment.kind == "single_turn":
        training.demonstration(0)
    found = []
    for name, one in sets.items():
        task, count = training, one.prompts or 1
        if name in of_their_own:
            task = _task(one.task(config.task), of_their_own[name], tokenizer, seed)
            source = of_their_own[name][0].source
            count = min(count, len(source)) if isinstance(source, Sized) else count
        _check_room(config, tokenizer, task.prompt(0, EVALUATION))
        found.append(EvaluationQuestions(name, task, count, one))
    return Tasks(tokenizer, training, tuple(found))


def _check_room(config: Config, tokenizer: Tokenizer, prompt: Prompt) -> None:
    """Refuse a first prompt that fills the context. Later ones are rejected when asked, and counted as too long."""
    if config.environment.kind not in ("single_turn", "tools"):
        return  # the user's own code decides what the policy sees
    limits = {"the model's context": tokenizer.positions, "environment.max_tokens": config.environment.max_tokens}
    for name, limit in limits.items():
        if limit is not None and len(prompt.tokens) >= limit:
            raise DataError(
                f"{prompt.where}, prompt",
                got=f"{len(prompt.tokens)} tokens",
                expected=f"fewer than the {limit} of {name}, with room for a response",
                hint="leave such rows out by task.filter",
            )


def _key(name: str) -> str:
    return f"evaluation.sets.{name}" if name else "evaluation"


def _open(section: TaskSection, key: str, wrong_share: float = 0.0) -> Sequence[TaskPart]:
    """Open the sources of a task, one for each part of a mixture."""
    if section.kind == "arithmetic":
        return [TaskPart(Arithmetic(section.operations, section.difficulty, wrong_share), f"{key}.kind arithmetic")]
    if section.kind not in READ:
        return [TaskPart(own.load(section.kind, section.options, key), f"{key}.kind {section.kind}")]
    keys = [f"{key}.sources.{index}" for index in range(len(section.sources))] or [key]
    return [_read(section.kind, source, at) for source, at in zip(section.mixture, keys, strict=True)]


def _read(kind: str, source: WeightedSource, key: str) -> TaskPart:
    if kind == "jsonl":
        found: Finite = jsonl.read(cast(Path, source.path), f"{key}.path", source.columns, keeps(source, key))
    else:
        found = datasets_reader.read(source, key)
    return TaskPart(found, f"{key}.path {source.path}", source.weight)


def _task(section: TaskSection, parts: Sequence[TaskPart], tokenizer: Tokenizer, seed: int) -> Task:
    encoder = Encoder(tokenizer, chat=section.chats, system=section.system_prompt, ending="\n" if section.kind in READ else "")
    found = [_numbered(part, encoder, seed, f" {index}" if len(parts) > 1 else "") for index, part in enumerate(parts)]
    return found[0] if len(found) == 1 else MixedTask(found, [part.weight for part in parts], seed)


def _numbered(part: TaskPart, encoder: Encoder, seed: int, order: str) -> Task:
    if isinstance(part.source, Sized):
        return ListedTask(part, encoder, seed, order)
    return DrawnTask(part.source, encoder, seed, part.name)
