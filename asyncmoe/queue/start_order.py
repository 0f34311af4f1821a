"""What starts next: pure. Restarted groups come first, then new ones."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Start:
    """A group to start.

    Attributes:
        number: number of the prompt; the same number asks the same question.
        attempt: number of times the group was started before.
        failures: number of these starts that failed since the group was last complete.
    """

    number: int
    attempt: int = 0
    failures: int = 0


@dataclass(frozen=True)
class Line:
    """All pending starts, in order.

    Attributes:
        next: number of the first group never started.
        groups: groups to restart.
    """

    next: int
    groups: tuple[Start, ...] = ()

    def take(self) -> tuple[Line, Start]:
        """Return the remaining line and the group that starts now."""
        if self.groups:
            return replace(self, groups=self.groups[1:]), self.groups[0]
        return replace(self, next=self.next + 1), Start(self.next)

    def again(self, *groups: Start) -> Line:
        """Restart these groups, before any new group."""
        return replace(self, groups=self.groups + groups)
