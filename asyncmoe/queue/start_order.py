"""What starts next: pure. Restarted members come first, then the partly started group, then restarted groups, then new groups.

No deadlock. Suppose the capacity law lets trajectories start one at a time. Groups share places and the trainer needs whole groups, so
several groups with a few places each could wait for each other forever. They cannot here: (1) at most one group is partly started,
because its other members come before any other group's; (2) a restarted member returned a place just before and comes before everything
else, so it never waits for a place. Places are therefore held by whole groups and at most one partial group. The law's capacity is a
multiple of the group size, and so is the number of places of whole groups, so while a group is partly started a place is free: its next
member may always start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncmoe.config.queue import Unit
from asyncmoe.errors import InvariantBroken


@dataclass(frozen=True)
class Start:
    """A group to start.

    Attributes:
        number: number of the prompt; the same number asks the same question.
        attempt: number of times the group, or one of its members, was started before.
        failures: number of these starts that failed since the group was last complete.
    """

    number: int
    attempt: int = 0
    failures: int = 0


@dataclass(frozen=True)
class Admit:
    """The next trajectories to start: members `first` to `first + count + spare` (exclusive) of a group; `spare` members take no place."""

    group: Start
    first: int
    count: int
    attempt: int
    spare: int = 0

    @property
    def members(self) -> range:
        """Member numbers within the group."""
        return range(self.first, self.first + self.count + self.spare)


@dataclass(frozen=True)
class Line:
    """All pending starts, in order.

    Attributes:
        next: number of the first group never started.
        unit: whether the capacity law admits whole groups or single trajectories.
        size: members of a group that take places.
        spare: additional members of a group, which start with its last member that takes a place.
        members: single members to restart.
        opened: the partly started group and its number of started members.
        groups: whole groups to restart.
    """

    next: int
    unit: Unit
    size: int
    spare: int = 0
    members: tuple[Admit, ...] = ()
    opened: tuple[Start, int] | None = None
    groups: tuple[Start, ...] = ()

    @property
    def places(self) -> int:
        """Number of places that the next `take` uses."""
        return self.size if self.unit == "group" else 1

    def take(self) -> tuple[Line, Admit]:
        """Return the remaining line and the trajectories that start now; they use `places` places."""
        if self.members:
            return replace(self, members=self.members[1:]), self.members[0]
        if self.opened is not None:
            group, begun = self.opened
        elif self.groups:
            group, begun = self.groups[0], 0
            self = replace(self, groups=self.groups[1:])
        else:
            group, begun = Start(self.next), 0
            self = replace(self, next=self.next + 1)
        after = begun + self.places
        opened, spare = (None, self.spare) if after == self.size else ((group, after), 0)
        return replace(self, opened=opened), Admit(group, begun, self.places, group.attempt, spare)

    def again(self, *groups: Start) -> Line:
        """Restart these groups, before any new group."""
        return replace(self, groups=self.groups + groups)

    def first(self, *groups: Start) -> Line:
        """Restart these groups, before any other."""
        return replace(self, groups=groups + self.groups)

    def again_alone(self, group: Start, member: int, attempt: int) -> Line:
        """Restart one member, before everything else. Raises InvariantBroken if groups start whole."""
        if self.unit == "group":
            raise InvariantBroken(f"line: member {member} of group {group.number} cannot start alone, groups start whole")
        return replace(self, members=(*self.members, Admit(group, member, 1, attempt)))

    def forget(self, group: Start) -> Line:
        """Remove all pending starts of a failed group."""
        opened = None if self.opened is not None and self.opened[0] == group else self.opened
        return replace(self, opened=opened, members=tuple(m for m in self.members if m.group != group))
