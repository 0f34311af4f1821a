"""Curriculum: a prompt whose responses all pass or all fail teaches nothing, so its turn is passed over more often than others'.

The order stays that of the task (`asyncmoe.rollout.tasks.order`). When the turn of a prompt comes, it is asked with the chance

    floor + (1 - floor) * 4 p (1 - p)

and else the next one in the order has its turn. p (1 - p) is the variance of a response's success, the learnability by which Foster et al.
2025 (Learning to Reason at the Frontier of Learnability, arXiv:2502.12272) choose questions; Bae et al. 2025 (Online Difficulty Filtering
for Reasoning Oriented Reinforcement Learning, arXiv:2504.03380) bound what a step can learn by it. p is a pass rate's mean under
Beta(1 + a, 1 + b): the posterior, from a uniform prior, of a prompt with a passed and b failed responses, where each new group first
multiplies a and b by `memory`, because the policy that earned them has changed. With s of n responses passed,

    a <- memory * a + s,    b <- memory * b + n - s,    p = (a + 1) / (a + b + 2)

A prompt that was never asked has p = 1/2, so the first epoch is that of the task.

Whether a turn is taken depends on the seed, the turn and the counts of the prompt only: the same seed and results give the same draws.
Mixtures keep their weights, because turns are passed over within a source. Nine bytes are kept for each example.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

import numpy as np

from asyncmoe.config.curriculum import CurriculumSection
from asyncmoe.errors import DataError, InvariantBroken
from asyncmoe.rollout.tasks.encode import identity
from asyncmoe.rollout.tasks.order import ListedTask, MixedTask
from asyncmoe.rollout.tasks.types import Demonstration, Gold, HasGolds, Prompt, Task

NONE, SOME, ALL = 1, 2, 3
"""How many responses of a prompt's last group passed; 0: the prompt has no group yet."""
_STREAM = "prompt"
_LOOKED_AT = 64
"""Examples by which a source is recognised after a resume."""


@dataclass
class PartState:
    """What is known of the examples of one source.

    Attributes:
        turn: number of the next turn in the source's order.
        passed_over: number of turns that were not taken.
        counts: float32, (examples, 2): passed and failed responses, faded.
        last: uint8, (examples,): `NONE`, `SOME` or `ALL`, or 0.
    """

    turn: int
    passed_over: int
    counts: np.ndarray
    last: np.ndarray


@dataclass
class CurriculumState:
    """All that a resumed run needs to draw as an uninterrupted one.

    Attributes:
        next: number of the first group never drawn.
        open: groups that were drawn and neither trained nor given up: (group, source, example).
        sources: digests of the sources and their order; a state fits only these.
    """

    next: int
    open: tuple[tuple[int, int, int], ...]
    sources: tuple[str, ...]
    parts: tuple[PartState, ...]


@dataclass(frozen=True)
class CurriculumFigures:
    """Figures of the prompts that were measured.

    Attributes:
        measured: their number.
        by_passed: shares of those of whose last group "none", "some" or "all" passed; empty before the first.
        difficulty: mean estimate of the failure rate, 0 to 1.
        passed_over: number of turns that were not taken.
    """

    measured: int
    by_passed: dict[str, float]
    difficulty: float | None
    passed_over: int


def estimate(passed: float, failed: float) -> float:
    """Return the estimated pass rate of a prompt with these faded counts."""
    return (passed + 1) / (passed + failed + 2)


def chance(passed: float, failed: float, floor: float) -> float:
    """Return the probability, `floor` to 1, that a prompt with these faded counts is asked when its turn comes."""
    rate = estimate(passed, failed)
    return floor + (1 - floor) * 4 * rate * (1 - rate)


def _uniform(text: str) -> float:
    """Return a number in [0, 1) that the text determines."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64


class _Part:
    """The draws from one source."""

    def __init__(self, task: ListedTask, section: CurriculumSection, seed: str) -> None:
        self.task, self._section, self._seed = task, section, seed
        size = len(task.source)
        self.state = PartState(0, 0, np.zeros((size, 2), np.float32), np.zeros(size, np.uint8))
        self.tally = _Tally()

    def draw(self, number: int) -> int:
        """Return the example that the `number`-th draw asks. Draws are made in order; one that is left out takes a turn."""
        state = self.state
        turn = max(state.turn, number)
        while True:
            index = self.task.index(_STREAM, turn)
            passed, failed = state.counts[index].tolist()
            if _uniform(f"{self._seed} {turn}") < chance(passed, failed, self._section.floor):
                break
            turn, state.passed_over = turn + 1, state.passed_over + 1
        state.turn = turn + 1
        return index

    def measured(self, index: int, passed: int, of: int) -> None:
        """Note that `passed` of the `of` responses of an example's group passed."""
        state = self.state
        self.tally.take(state, index, -1)
        state.counts[index] = state.counts[index] * self._section.memory + (passed, of - passed)
        state.last[index] = ALL if passed == of else SOME if passed else NONE
        self.tally.take(state, index, 1)

    def restore(self, state: PartState) -> None:
        self.state, self.tally = state, _Tally()
        measured = state.last > 0
        counts = state.counts[measured].astype(np.float64)
        self.tally.by_last = np.bincount(state.last, minlength=4).tolist()
        self.tally.difficulty = float((1 - (counts[:, 0] + 1) / (counts.sum(1) + 2)).sum())

    @cached_property
    def digest(self) -> str:
        """A digest of the order's seed, the number of examples and of those that training asks, and the questions of some."""
        source = self.task.source
        size = len(source)
        found = hashlib.blake2b(f"{self._seed} {size} {self.task.epoch}".encode(), digest_size=16)
        for index in sorted({0, size - 1, *Random(size).sample(range(size), min(size, _LOOKED_AT))}):
            found.update(identity(source[index].prompt))
        return found.hexdigest()


@dataclass
class _Tally:
    """Sums over the measured examples, so that figures cost nothing.

    Attributes:
        by_last: number of examples by `PartState.last`; the first is not used.
        difficulty: sum of the estimated failure rates.
    """

    by_last: list[int] = field(default_factory=lambda: [0] * 4)
    difficulty: float = 0.0

    def take(self, state: PartState, index: int, sign: int) -> None:
        """Add an example, or with -1 remove it."""
        last = int(state.last[index])
        if last:
            self.by_last[last] += sign
            self.difficulty += sign * (1 - estimate(*state.counts[index].tolist()))


class Curriculum:
    """A task whose prompts are drawn by measured difficulty. See `Task`; all but the prompts of training are those of `task`.

    Args:
        task: with a length, or a mixture of such.
        key: section of the task, for messages.

    Raises:
        DataError: a source is endless or a stream.
    """

    def __init__(self, task: Task, section: CurriculumSection, seed: int, key: str = "task") -> None:
        self._task, self._section = task, section
        self._draws = task.draws if isinstance(task, MixedTask) else None
        tasks = task.tasks if isinstance(task, MixedTask) else [task]
        self._parts = [_Part(_listed(one, key), section, f"{seed} curriculum {number}") for number, one in enumerate(tasks)]
        self._open: dict[int, tuple[int, int]] = {}
        self._next = 0

    def prompt(self, group: int, stream: str = _STREAM) -> Prompt:
        """See `Task`. Of a group of training that is not open (`draw`), the prompt is that of the task."""
        if stream == _STREAM and group in self._open:
            part, index = self._open[group]
            return self._parts[part].task.asking(index)
        return self._task.prompt(group, stream)

    def demonstration(self, index: int) -> Demonstration:
        """See `Task`."""
        return self._task.demonstration(index)

    def golds(self) -> Iterable[Gold]:
        """See `HasGolds`."""
        return self._task.golds() if isinstance(self._task, HasGolds) else ()

    def draw(self, group: int) -> None:
        """Draw the prompt of a group, and keep it until `closed`. A group that is open keeps its prompt.

        Raises:
            InvariantBroken: the group was closed.
        """
        if group in self._open:
            return
        if group < self._next:
            raise InvariantBroken(f"curriculum: group {group} is drawn again, the next one is {self._next}")
        part, number = (0, group) if self._draws is None else self._draws.at(_STREAM, group)
        self._open[group] = part, self._parts[part].draw(number)
        self._next = group + 1

    def measured(self, group: int, rewards: Sequence[float]) -> None:
        """Note the rewards of the episodes of an open group."""
        part, index = self._open[group]
        self._parts[part].measured(index, sum(reward >= self._section.pass_reward for reward in rewards), len(rewards))

    def closed(self, group: int) -> None:
        """Forget a group that is trained or given up: it is not asked again."""
        self._open.pop(group, None)

    def first(self, least: int) -> int:
        """Return the number of the first group never drawn, at least `least`."""
        return max(least, self._next)

    @property
    def open(self) -> list[int]:
        """Groups that were drawn and neither trained nor given up, in order."""
        return sorted(self._open)

    def figures(self) -> CurriculumFigures:
        """Return the figures of the measured prompts."""
        none, some, every = (sum(part.tally.by_last[last] for part in self._parts) for last in (NONE, SOME, ALL))
        measured = none + some + every
        shares = {"none": none / measured, "some": some / measured, "all": every / measured} if measured else {}
        difficulty = sum(part.tally.difficulty for part in self._parts) / measured if measured else None
        return CurriculumFigures(measured, shares, difficulty, sum(part.state.passed_over for part in self._parts))

    def state(self) -> CurriculumState:
        """Return a copy of the state."""
        parts = (part.state for part in self._parts)
        copies = tuple(PartState(one.turn, one.passed_over, one.counts.copy(), one.last.copy()) for one in parts)
        opened = tuple((group, *self._open[group]) for group in self.open)
        return CurriculumState(self._next, opened, self.sources, copies)

    @property
    def sources(self) -> tuple[str, ...]:
        """Digests of the sources."""
        return tuple(part.digest for part in self._parts)

    @property
    def sizes(self) -> list[int]:
        """Number of examples of each source."""
        return [len(part.task.source) for part in self._parts]

    def restore(self, state: CurriculumState) -> None:
        """Continue from a state of the same sources."""
        for part, one in zip(self._parts, state.parts, strict=True):
            part.restore(one)
        self._open = {group: (part, index) for group, part, index in state.open}
        self._next = state.next


def _listed(task: Task, key: str) -> ListedTask:
    if not isinstance(task, ListedTask):
        hint = f"give the class __len__ and __getitem__, or set {key}.curriculum.enabled to false"
        raise DataError(f"{key}.curriculum.enabled", got="a source without end", expected="sources of known length", hint=hint)
    return task
