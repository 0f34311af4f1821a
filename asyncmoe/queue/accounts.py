"""The ledger of all episodes, with a reason for each that ended untrained. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from asyncmoe.errors import InvariantBroken
from asyncmoe.queue.admission import Ledger, State


@dataclass(frozen=True)
class Accounts:
    """A ledger, with counts by reason of its dropped, rejected, requeued and skipped episodes.

    Each transition returns new accounts. It raises InvariantBroken if the ledger refuses it.
    """

    ledger: Ledger
    dropped: Mapping[str, int] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    requeued: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for state in ("dropped", "rejected", "requeued", "skipped"):
            reasons: Mapping[str, int] = getattr(self, state)
            if sum(reasons.values()) != getattr(self.ledger, state):
                raise InvariantBroken(f"ledger: the reasons {reasons} do not add up to {state} of {self.ledger}")

    def end(self, count: int, source: State, to: Literal["dropped", "rejected", "requeued", "skipped"], reason: str) -> Accounts:
        """Move `count` episodes to a final state, under a reason; see `Ledger`."""
        reasons: Mapping[str, int] = getattr(self, to)
        counted = {**reasons, reason: reasons.get(reason, 0) + count}
        return replace(self, ledger=self.ledger.move(count, source, to), **{to: counted})

    @property
    def all_dropped(self) -> dict[str, int]:
        """Dropped episodes by reason, including those of skipped batches."""
        reasons = dict.fromkeys((*self.dropped, *self.skipped))
        return {reason: self.dropped.get(reason, 0) + self.skipped.get(reason, 0) for reason in reasons}
