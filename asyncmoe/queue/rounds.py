"""Tail batching: which groups a round starts, and which it puts off. Pure; for modes in which engines and trainer take turns.

A short round starts more groups than it needs, its spare groups, and is over when as many as it needs are complete. The others hold the
longest responses; they are cancelled and put off. Once a whole round of them has been put off, a long round starts these alone and waits
for all of them. So most rounds have a short tail, long responses wait for each other, and each prompt is trained once. (Gao et al.,
RollPacker, arXiv 2509.21009; it also cuts off the longest responses of each group, which this does not.)

Spare groups take no places under the capacity law (`asyncmoe.queue.admission`). While a round is under way, `places - complete` of its
unfinished groups hold one and `spare` hold none, and which ones they are is open: the first to be complete take the places. So a complete
group always finds a place, and when the round is over, all that is left is spare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from asyncmoe.errors import InvariantBroken

G = TypeVar("G")


@dataclass(frozen=True)
class Rounds(Generic[G]):
    """The rounds of a run; between two of them, `is_over` is true.

    Invariant, checked at every change: 0 <= complete <= places <= size <= needed, 0 <= spare.

    Attributes:
        needed: groups that a round trains, if the capacity law admits as many.
        factor: groups that a short round starts, as a multiple; 1: no group is spare or put off.
        number: of this round.
        size: complete groups that this round needs.
        places: its groups that hold places, complete or not.
        spare: its unfinished groups that hold none.
        complete: its complete groups.
        deferred: what was put off, in order.
    """

    needed: int
    factor: float = 1.0
    number: int = 0
    size: int = 0
    places: int = 0
    spare: int = 0
    complete: int = 0
    deferred: tuple[G, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.complete <= self.places <= self.size <= self.needed or self.spare < 0:
            raise InvariantBroken(f"round: impossible counts: {self}")

    @property
    def is_off(self) -> bool:
        """Whether there is no tail batching."""
        return self.factor == 1

    @property
    def is_over(self) -> bool:
        """Whether the round has all that it needs; the next one may begin."""
        return self.complete == self.size

    @property
    def is_full(self) -> bool:
        """Whether no further group may start before the round is over."""
        return self.places == self.size and not self.is_over

    def begin(self, admitted: int) -> tuple[Rounds[G], tuple[G, ...]]:
        """Begin the next round; its `places` and `spare` groups start now.

        Args:
            admitted: groups that the capacity law admits, at least one.

        Returns:
            The round, and what it starts that was put off before, in order; all else that it starts is new.
        """
        if not self.is_over or admitted < 1:
            raise InvariantBroken(f"round: it cannot begin with {admitted} groups: {self}")
        size = min(self.needed, admitted)
        long = not self.is_off and size == self.needed <= len(self.deferred)
        again, kept = (self.deferred[:size], self.deferred[size:]) if long else ((), self.deferred)
        spare = 0 if long else math.ceil(self.factor * size) - size
        return replace(self, number=self.number + 1, size=size, places=size, spare=spare, complete=0, deferred=kept), again

    def start(self, count: int = 1) -> Rounds[G]:
        """Start groups in places that were returned."""
        return replace(self, places=self.places + count)

    def complete_one(self) -> Rounds[G]:
        """A group of the round is complete."""
        return replace(self, complete=self.complete + 1)

    def lose_one(self, was_complete: bool = False) -> tuple[Rounds[G], bool]:
        """A group of the round has failed. Return whether a spare one takes its place; if not, the place returns to the law."""
        lost = replace(self, complete=self.complete - 1) if was_complete else self
        if lost.spare:
            return replace(lost, spare=lost.spare - 1), True
        return replace(lost, places=lost.places - 1), False

    def put_off(self, groups: Sequence[G]) -> Rounds[G]:
        """Put off the spare groups of a round that is over. Raises InvariantBroken if these are not all."""
        if not self.is_over or len(groups) != self.spare:
            raise InvariantBroken(f"round: {len(groups)} groups to put off: {self}")
        return replace(self, spare=0, deferred=(*self.deferred, *groups))
