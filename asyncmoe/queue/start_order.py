"""What starts next: pure. Members started over come first, then the group that is partly started, then groups started over, then new ones.

No deadlock. Let the capacity law let one trajectory after the other start. Groups share places, and the trainer needs whole groups, so
several groups with a few places each could wait for each other without end. They cannot here: (1) at most one group is partly started,
because its other members come before any other group's; (2) a member that is started over gave back a place just before, and comes before
everything else, so it never waits for one. Places are held, then, by whole groups and at most one part of a group. The law's capacity is a
multiple of the group size, as is what whole groups hold, so while a group is partly started it is short of places only if a place is
free: its next member may always start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncmoe.config.generation import Unit
from asyncmoe.errors import InvariantBroken


@dataclass(frozen=True)
class Start:
    """A group to be started.

    Attributes:
        number: which prompt; the same number asks the same question.
        attempt: times the group, or one of its members, was started before.
        failures: those of them that ended in a failure, since it was last complete.
    """

    number: int
    attempt: int = 0
    failures: int = 0


@dataclass(frozen=True)
class Admit:
    """The next trajectories to start: members `first` to `first + count + spare` (exclusive) of a group; `spare` of them take no place."""

    group: Start
    first: int
    count: int
    attempt: int
    spare: int = 0

    @property
    def members(self) -> range:
        """Their numbers within the group."""
        return range(self.first, self.first + self.count + self.spare)


@dataclass(frozen=True)
class Line:
    """Everything that is still to be started, in order.

    Attributes:
        next: number of the first group that has never been started.
        unit: what the capacity law lets start.
        size: members of a group that take places.
        spare: further ones, which start with the last of those.
        members: single ones to be started over.
        opened: the group that is partly started, and its members that are.
        groups: whole ones to be started over.
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
        """How many trajectories the next `take` starts."""
        return self.size if self.unit == "group" else 1

    def take(self) -> tuple[Line, Admit]:
        """What starts now; `places` of them."""
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
        """Start these groups over, before any new one."""
        return replace(self, groups=self.groups + groups)

    def again_alone(self, group: Start, member: int, attempt: int) -> Line:
        """Start one member over, before everything else. InvariantBroken where groups start whole."""
        if self.unit == "group":
            raise InvariantBroken(f"line: member {member} of group {group.number} cannot start alone, groups start whole")
        return replace(self, members=(*self.members, Admit(group, member, 1, attempt)))

    def forget(self, group: Start) -> Line:
        """The group has fallen: what of it has not started never will."""
        opened = None if self.opened is not None and self.opened[0] == group else self.opened
        return replace(self, opened=opened, members=tuple(m for m in self.members if m.group != group))
