"""Which examples training asks and which the evaluation: held-out examples, and those that evaluation sets have in common with training."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from asyncmoe.errors import DataError
from asyncmoe.rollout.tasks.encode import identity
from asyncmoe.rollout.tasks.order import EVALUATION, MixedDraws
from asyncmoe.rollout.tasks.types import Finite

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Share:
    """Indices of a source: those that training asks and those held out for the evaluation."""

    trained: Sequence[int]
    held: Sequence[int]


def quotas(count: int, weights: Sequence[float], seed: int) -> list[int]:
    """Return how many of `count` held-out questions each source of a mixture provides: as many as the evaluation's numbers take from it."""
    draws = MixedDraws(weights, seed)
    taken = Counter(draws.at(EVALUATION, number)[0] for number in range(count))
    return [taken[part] for part in range(len(weights))]


def identities(source: Finite) -> Iterator[bytes]:
    """Yield the identity of every example's prompt; see `asyncmoe.rollout.tasks.encode.identity`."""
    return (identity(source[index].prompt) for index in range(len(source)))


def split(sources: Sequence[Finite], names: Sequence[str], held: Sequence[int], seed: int, left_out: frozenset[bytes]) -> list[Share]:
    """Divide the examples of a task's sources between training and evaluation.

    Args:
        names: of the sources, for messages.
        held: number of examples to hold out of each source; which ones is drawn from the seed.
        left_out: identities of other questions that training must not ask.

    Raises:
        DataError: more than half of a source would be held out, or nothing is left to train on.
    """
    known = [list(identities(source)) for source in sources]
    for name, ids in zip(names, known, strict=True):
        if common := sum(one in left_out for one in ids):
            log.warning("%s: training leaves out %d questions that the evaluation asks", name, common)
    drawn = [
        _drawn(name, len(ids), count, f"{seed} held out {part}")
        for part, (name, ids, count) in enumerate(zip(names, known, held, strict=True))
    ]
    # One question may be in several rows, and in several sources.
    banned = left_out.union(ids[index] for ids, indices in zip(known, drawn, strict=True) for index in indices)
    shares = []
    for name, ids, indices in zip(names, known, drawn, strict=True):
        trained = [index for index, one in enumerate(ids) if one not in banned]
        if not trained:
            raise DataError(name, got="only questions that the evaluation asks", expected="at least one other, to train on")
        shares.append(Share(trained, indices))
    return shares


def _drawn(name: str, size: int, count: int, seed: str) -> list[int]:
    if 2 * count > size:
        hint = "lower evaluation.prompts, name evaluation.path, or set evaluation.every to 0"
        expected = f"at most half of the {size} questions of {name}, which are held out from training"
        raise DataError("evaluation.prompts", got=f"{count} held-out questions", expected=expected, hint=hint)
    return Random(seed).sample(range(size), count)
