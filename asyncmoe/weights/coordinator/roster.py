"""The engines that receive versions, in an order that assigns each its ranks of the weight group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from asyncmoe.engines.member import Member
from asyncmoe.engines.pool import Pool


@dataclass(frozen=True)
class EngineSet:
    """The engines that receive versions: a roster.

    Attributes:
        number: sequence number of this roster.
        offsets: each member's first rank in the weight group, whose rank 0 is the sender.
    """

    number: int
    members: tuple[Member, ...]

    @property
    def offsets(self) -> list[int]:
        return list(accumulate((m.engine.tp for m in self.members), initial=1))[:-1]

    @property
    def world(self) -> int:
        return 1 + sum(m.engine.tp for m in self.members)

    def offset(self, member: Member) -> int:
        """Return a member's first rank in the weight group."""
        return self.offsets[self.members.index(member)]

    def now(self, pool: Pool) -> EngineSet:
        """Return this set, or a new one with the next number if the present engines that are not leaving differ from its members."""
        members = tuple(m for m in pool.present if not m.leaving)
        return self if members == self.members else EngineSet(self.number + 1, members)

    def anew(self, pool: Pool) -> EngineSet:
        """Return the present engines under the next number, even if they are the same engines: everything made for this set is gone."""
        return replace(self.now(pool), number=self.number + 1)
