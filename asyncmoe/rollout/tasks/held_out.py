"""Split examples between training and evaluation: held-out examples, and those that evaluation sets have in common with training."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence, Sized
from dataclasses import replace
from random import Random

from asyncmoe.errors import DataError
from asyncmoe.rollout.tasks.encode import example_at, identity
from asyncmoe.rollout.tasks.order import EVALUATION, MixedDraws, TaskPart
from asyncmoe.rollout.tasks.types import Finite

log = logging.getLogger(__name__)


def identities(source: Finite, name: str) -> list[bytes]:
    """Return the identity of every example's prompt; see `asyncmoe.rollout.tasks.encode.identity`. `name`: name of the source."""
    return [identity(example_at(source, index, name).prompt) for index in range(len(source))]


def divide(parts: Sequence[TaskPart], held: int, asked: frozenset[bytes], seed: int) -> Sequence[TaskPart]:
    """Divide the questions of a task's parts between training and evaluation; an endless part draws separate questions for each.

    Args:
        held: total number of questions to hold out; each part gives up as many as the evaluation asks from it, chosen with the seed.
        asked: identities of the evaluation's questions that come from another source; training leaves them out.

    Raises:
        DataError: more than half of a part would be held out, or nothing is left to train on.
    """
    sources = [part.source for part in parts if isinstance(part.source, Sized)]
    if not sources or not (held or asked):
        return parts
    known = [identities(source, part.name) for source, part in zip(sources, parts, strict=True)]
    for part, ids in zip(parts, known, strict=True):
        if common := sum(one in asked for one in ids):
            log.warning("%s: training leaves out %d questions that the evaluation asks", part.name, common)
    draws = MixedDraws([part.weight for part in parts], seed)
    counts = Counter(draws.at(EVALUATION, number)[0] for number in range(held))
    named = enumerate(zip(parts, known, strict=True))
    drawn = [_drawn(part.name, len(ids), counts[number], f"{seed} held out {number}") for number, (part, ids) in named]
    # The same question may be in several rows and sources.
    banned = asked.union(ids[index] for ids, indices in zip(known, drawn, strict=True) for index in indices)
    divided = []
    for part, source, ids, indices in zip(parts, sources, known, drawn, strict=True):
        trained = [index for index, one in enumerate(ids) if one not in banned]
        if not trained:
            raise DataError(part.name, got="only questions that the evaluation asks", expected="at least one other, to train on")
        divided.append(replace(part, trained=trained, held=[source[index] for index in indices]))
    return divided


def _drawn(name: str, size: int, count: int, seed: str) -> list[int]:
    if 2 * count > size:
        hint = "lower evaluation.prompts, name evaluation.path, or set evaluation.every to 0"
        expected = f"at most half of the {size} questions of {name}, because training leaves held-out questions out"
        raise DataError("evaluation.prompts", got=f"{count} held-out questions", expected=expected, hint=hint)
    return Random(seed).sample(range(size), count)
