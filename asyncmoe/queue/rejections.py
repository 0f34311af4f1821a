"""The share of rejected groups, and when it ends a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

WINDOW = 128
"""Number of most recent groups that count."""
MINIMUM = 32
"""Minimum number of groups before the share counts."""


@dataclass(frozen=True)
class Rejections:
    """The outcomes of the most recent groups. Immutable; `note` returns the next state.

    Attributes:
        limit: allowed share of rejected groups, 0 to 1.
        last: for each of the last `WINDOW` groups the reason of its rejection, or "".
    """

    limit: float
    last: tuple[str, ...] = ()

    def note(self, reason: str) -> Rejections:
        """Count a group: `reason` for its rejection, or "" if it was not rejected."""
        return replace(self, last=(*self.last, reason)[-WINDOW:])

    @property
    def reasons(self) -> Counter[str]:
        """Number of rejected groups by reason."""
        return Counter(filter(None, self.last))

    @property
    def exceeded(self) -> bool:
        """True if all groups, or more than allowed, were rejected."""
        rejected = self.reasons.total()
        return len(self.last) >= MINIMUM and (rejected > self.limit * len(self.last) or rejected == len(self.last))

    def __str__(self) -> str:
        """Describe the rejections, for example: "20 of the last 32 groups were rejected (scorer_error 18, engine_died 2)"."""
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.reasons.most_common())
        return f"{self.reasons.total()} of the last {len(self.last)} groups were rejected ({reasons})"
