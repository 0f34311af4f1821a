"""Map prompt numbers to examples: of an endless source, a finite one, or a mixture."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from random import Random

from asyncmoe.rollout.tasks.encode import Encoder, drawn, example_at
from asyncmoe.rollout.tasks.types import Demonstration, Endless, Example, Finite, HasGolds, Prompt, Task

EVALUATION = "evaluation"
"""Stream of the evaluation questions."""
_BLOCK, _STREAMS = 1024, 3
"""Numbers in a block of a mixture; streams, for each of which one block and one order are kept."""


@dataclass(frozen=True)
class TaskPart:
    """A source of a task, with its name for messages.

    Attributes:
        trained: indices for training and warm-up; None: all.
        held: examples for the evaluation; None: the source itself.
    """

    source: Finite | Endless
    name: str
    weight: float = 1.0
    trained: Sequence[int] | None = None
    held: Sequence[Example] | None = None


class DrawnTask:
    """An endless source: prompt n of a stream is drawn with a generator seeded by the run's seed, the stream and n. See `Task`.

    Args:
        name: name of the source, for messages.
    """

    def __init__(self, source: Endless, encoder: Encoder, seed: int, name: str) -> None:
        self._source, self._encoder, self._seed, self._name = source, encoder, seed, name

    def prompt(self, group: int, stream: str = "prompt") -> Prompt:
        """See `Task`."""
        return self._encoder.prompt(self._draw(group, stream))

    def demonstration(self, index: int) -> Demonstration:
        """See `Task`."""
        return self._encoder.demonstration(self._draw(index, "demonstration"))

    def _draw(self, number: int, stream: str) -> Example:
        return drawn(self._source, Random(f"{self._seed} {stream} {number}"), f"{self._name}, {stream} {number}")


class ListedTask:
    """A finite source; each epoch visits every example once, in its own order, which the seed and the stream determine. See `Task`.

    Args:
        part: must have a finite source.
        order: distinguishes this source's orders from those of the other sources in a mixture.
    """

    def __init__(self, part: TaskPart, encoder: Encoder, seed: int, order: str = "") -> None:
        assert isinstance(part.source, Sized)
        self._source: Finite = part.source
        self._encoder, self._seed, self._name, self._order = encoder, seed, part.name, order
        self._trained: Sequence[int] = range(len(self._source)) if part.trained is None else part.trained
        self._held: Finite = self._source if part.held is None else part.held
        self._order_of = lru_cache(_STREAMS)(self._shuffled)

    def prompt(self, group: int, stream: str = "prompt") -> Prompt:
        """See `Task`."""
        index = self.index(stream, group)
        return self._encoder.prompt(example_at(self._held if stream == EVALUATION else self._source, index, self._name))

    def demonstration(self, index: int) -> Demonstration:
        """See `Task`."""
        return self._encoder.demonstration(example_at(self._source, self.index("demonstration", index), self._name))

    def golds(self) -> Iterable[Example]:
        """See `HasGolds`."""
        every = (example_at(self._source, index, self._name) for index in range(len(self._source)))
        return (example for example in every if example.answer)

    def index(self, stream: str, number: int) -> int:
        """Return the index of a number of a stream: into the source, or for `EVALUATION` into the held-out examples."""
        epoch, place = divmod(number, len(self._held if stream == EVALUATION else self._trained))
        return self._order_of(stream, epoch)[place]

    def _shuffled(self, stream: str, epoch: int) -> array[int]:
        order = array("q", range(len(self._held)) if stream == EVALUATION else self._trained)
        Random(f"{self._seed} {stream} {epoch}{self._order}").shuffle(order)
        return order


class MixedTask:
    """Several tasks: for each prompt, one is drawn in proportion to the weights, by a generator seeded with the seed and the stream. See
    `Task`.

    The n-th prompt taken from a task is that task's prompt n, so no task skips or repeats an example because of the others.
    """

    def __init__(self, tasks: Sequence[Task], weights: Sequence[float], seed: int) -> None:
        self._tasks, self._draws = tasks, MixedDraws(weights, seed)

    def prompt(self, group: int, stream: str = "prompt") -> Prompt:
        """See `Task`."""
        part, number = self._draws.at(stream, group)
        return self._tasks[part].prompt(number, stream)

    def demonstration(self, index: int) -> Demonstration:
        """See `Task`."""
        part, number = self._draws.at("demonstration", index)
        return self._tasks[part].demonstration(number)

    def golds(self) -> Iterable[Example]:
        """See `HasGolds`; covers the tasks that have them."""
        return chain.from_iterable(task.golds() for task in self._tasks if isinstance(task, HasGolds))


class MixedDraws:
    """Draws the task of a mixture for each number, in blocks of `_BLOCK` numbers, so that a resumed run finds its position quickly."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self._weights, self._seed = weights, seed
        self._before: dict[str, list[tuple[int, ...]]] = {}
        self._block = lru_cache(_STREAMS)(self._drawn)

    def at(self, stream: str, number: int) -> tuple[int, int]:
        """Return the task of a number, and how many earlier numbers of the stream took the same task."""
        block, place = divmod(number, _BLOCK)
        before = self._before.setdefault(stream, [(0,) * len(self._weights)])
        while len(before) <= block:
            drawn = self._block(stream, len(before) - 1)
            before.append(tuple(count + drawn.count(part) for part, count in enumerate(before[-1])))
        drawn = self._block(stream, block)
        part = drawn[place]
        return part, before[block][part] + drawn[:place].count(part)

    def _drawn(self, stream: str, block: int) -> list[int]:
        random = Random(f"{self._seed} {stream} mixture {block}")
        return random.choices(range(len(self._weights)), self._weights, k=_BLOCK)
