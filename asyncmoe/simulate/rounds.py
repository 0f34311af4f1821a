"""Tail batching: which groups a round of a mode with batches starts, and which it puts off.

A short round starts more groups than it needs, and ends when as many as it needs are complete. The others hold the longest responses; they
are cancelled and put off. Once a round's worth has been put off, a long round starts these alone and waits for all of them. So most rounds
have a short tail, long responses wait for each other, and each prompt is trained once. (Gao et al., RollPacker, arXiv 2509.21009; it also
cuts off the longest responses of each group, which this does not.)

A group that is put off has the same lengths when it starts again, which flatters the policy: a real one is sampled anew.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

G = TypeVar("G")


@dataclass
class TailRounds(Generic[G]):
    """The rounds of a run.

    Attributes:
        needed: groups that a round trains.
        factor: groups that a short round starts, as a multiple; 1: all rounds are alike and nothing is put off.
        complete: groups of this round that are complete.
        deferred: what was put off.
    """

    needed: int
    factor: float
    complete: int = 0
    deferred: deque[G] = field(default_factory=deque)

    def begin(self) -> tuple[list[G], int]:
        """Begin a round of `needed` groups: return those of them that were put off before, and how many spare ones start besides."""
        self.complete = 0
        if self.factor > 1 and len(self.deferred) >= self.needed:
            return [self.deferred.popleft() for _ in range(self.needed)], 0
        return [], math.ceil(self.factor * self.needed) - self.needed

    def note_complete(self) -> bool:
        """Note that a group of the round is complete; return whether the round needs no more."""
        self.complete += 1
        return self.complete >= self.needed
