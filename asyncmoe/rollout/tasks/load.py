"""The tasks of a run: the training task and the evaluation sets that the configuration names, read, checked and tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from asyncmoe.config import Config
from asyncmoe.config.evaluation import EvaluationSet
from asyncmoe.config.task import READ, TaskSection, WeightedSource
from asyncmoe.rollout.tasks import jsonl, own
from asyncmoe.rollout.tasks.arithmetic import Arithmetic
from asyncmoe.rollout.tasks.encode import Encoder
from asyncmoe.rollout.tasks.held_out import Share, identities, quotas, split
from asyncmoe.rollout.tasks.order import EVALUATION, DrawnTask, ListedTask, MixedTask
from asyncmoe.rollout.tasks.rows import keeps
from asyncmoe.rollout.tasks.types import Endless, Finite, Task
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
    """All tasks of a run; `sets` is empty without evaluation."""

    training: Task
    sets: tuple[EvaluationQuestions, ...] = ()


@dataclass(frozen=True)
class _Part:
    """A source with its name for messages."""

    source: Finite | Endless
    name: str
    weight: float = 1.0


def load(config: Config, tokenizer: Tokenizer) -> Tasks:
    """Read the training task and, unless `evaluation.every` is 0, the evaluation sets, and try the first prompt of each.

    Raises:
        ConfigError: a class or function of the user's cannot be loaded, or a package is missing.
        DataError: a source is unusable, too small, or has questions of an evaluation set; names file and line, or row, and column.
    """
    seed = config.run.seed
    parts = _open(config.task, "task", config.warmup.wrong_share)
    sets = config.evaluation.every_set if config.evaluation.every else {}
    own_sources = {name: _open(one.task(config.task), _key(name)) for name, one in sets.items() if not one.held_out}
    held = max((one.prompts or 0 for one in sets.values() if one.held_out), default=0)
    shares = _shares(parts, seed, held, sets, own_sources) if sets else None
    training = _task(config.task, parts, tokenizer, seed, shares)
    training.prompt(0)
    if config.warmup.steps and config.environment.kind == "single_turn":
        training.demonstration(0)
    found = []
    for name, one in sets.items():
        mine = own_sources.get(name)
        task = training if mine is None else _task(one.task(config.task), mine, tokenizer, seed)
        task.prompt(0, EVALUATION)
        count = one.prompts or 1
        found.append(EvaluationQuestions(name, task, count if mine is None else min(count, _size(mine[0].source) or count), one))
    return Tasks(training, tuple(found))


def _key(name: str) -> str:
    return f"evaluation.sets.{name}" if name else "evaluation"


def _open(section: TaskSection, key: str, wrong_share: float = 0.0) -> list[_Part]:
    """Open the sources of a task, one for each part of a mixture."""
    if section.kind == "arithmetic":
        return [_Part(Arithmetic(section.operations, section.difficulty, wrong_share), f"{key}.kind arithmetic")]
    if section.kind not in READ:
        return [_Part(own.load(section.kind, section.options, key), f"{key}.kind {section.kind}")]
    keys = [f"{key}.sources.{index}" for index in range(len(section.sources))] or [key]
    return [_read(section.kind, source, at) for source, at in zip(section.mixture, keys, strict=True)]


def _read(kind: str, source: WeightedSource, key: str) -> _Part:
    path = cast(Path, source.path)
    name = f"{key}.path {path}"
    rows = jsonl.read(path, f"{key}.path", source.columns, keeps(source, key))
    return _Part(jsonl.JsonlFile(rows), name, source.weight)


def _shares(
    parts: Sequence[_Part], seed: int, held: int, sets: dict[str, EvaluationSet], own_sources: dict[str, list[_Part]]
) -> list[Share] | None:
    """Return what each source gives to training and evaluation; None if the sources cannot be searched."""
    sources = [part.source for part in parts]
    if any(_size(source) is None for source in sources):
        return None
    overlap = {
        name: [one for part in mine if _size(part.source) is not None for one in identities(cast(Finite, part.source))]
        for name, mine in own_sources.items()
        if sets[name].overlap != "allow"
    }
    refused = {one: _key(name) for name, ids in overlap.items() if sets[name].overlap == "refuse" for one in ids}
    left_out = frozenset(one for name, ids in overlap.items() if sets[name].overlap == "leave_out" for one in ids)
    names, weights = [part.name for part in parts], [part.weight for part in parts]
    if not (refused or left_out or held):
        return None
    return split([cast(Finite, source) for source in sources], names, quotas(held, weights, seed), seed, left_out, refused)


def _task(section: TaskSection, parts: Sequence[_Part], tokenizer: Tokenizer, seed: int, shares: Sequence[Share] | None = None) -> Task:
    ending = "\n" if section.kind in READ else ""
    encoder = Encoder(tokenizer, chat=section.chats, system=section.system_prompt, ending=ending)
    found: list[Task] = []
    for index, part in enumerate(parts):
        share = None if shares is None else shares[index]
        found.append(_numbered(part, encoder, seed, share, f" {index}" if len(parts) > 1 else ""))
    return found[0] if len(found) == 1 else MixedTask(found, [part.weight for part in parts], seed)


def _numbered(part: _Part, encoder: Encoder, seed: int, share: Share | None, order: str) -> Task:
    if _size(part.source) is None:
        return DrawnTask(cast(Endless, part.source), encoder, seed, part.name)
    trained, held = (None, None) if share is None else (share.trained, share.held or None)
    return ListedTask(cast(Finite, part.source), encoder, seed, part.name, trained=trained, held=held, part=order)


def _size(source: Finite | Endless) -> int | None:
    """Return the number of examples; None without end."""
    return len(cast(Finite, source)) if hasattr(source, "__len__") else None
