"""When a group is whole, and when it falls: pure.

A group needs `size` complete responses. It may run some spare ones beside them (over-sampling): the first `size` that finish make the
group, whichever they are, and the others are cut short. Long responses finish last, so what is trained is biased towards short ones;
that is the price of not waiting for the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from asyncmoe.errors import InvariantBroken

Fate = Literal["spared", "again", "fallen"]
"""Of a failed response: a spare one takes its place; it is started over alone; its group falls with it."""


@dataclass(frozen=True)
class Gathering:
    """One group in flight.

    Invariant: 0 <= done <= places <= size, 0 <= spare; places + spare - done of its responses run.

    Attributes:
        size: complete responses it needs.
        places: of those started, the ones that hold a place under the capacity law.
        spare: of those started, the ones that will not be needed.
        done: complete ones.
    """

    size: int
    places: int = 0
    spare: int = 0
    done: int = 0

    def __post_init__(self) -> None:
        if min(self.places, self.spare, self.done) < 0 or not self.done <= self.places <= self.size:
            raise InvariantBroken(f"group: counts that cannot be: {self}")

    @property
    def whole(self) -> bool:
        """It has what it needs."""
        return self.done == self.size

    def admit(self, places: int, spare: int = 0) -> Gathering:
        """Some more have started."""
        return replace(self, places=self.places + places, spare=self.spare + spare)

    def finish(self) -> Gathering:
        """A response is complete."""
        return replace(self, done=self.done + 1)

    def close(self) -> Gathering:
        """It is whole, and its spare responses are cut short."""
        return replace(self, spare=0)

    def fail(self, alone: bool) -> tuple[Gathering, Fate]:
        """A response failed.

        Args:
            alone: it would be of use to start it over, and members may start alone.
        """
        if self.spare:
            return replace(self, spare=self.spare - 1), "spared"
        return (replace(self, places=self.places - 1), "again") if alone else (self, "fallen")


def all_equal(rewards: Sequence[float]) -> bool:
    """Nothing to learn from: every advantage within the group is 0 (DAPO's dynamic sampling, arXiv 2503.14476, section 3.2)."""
    return min(rewards) == max(rewards)
