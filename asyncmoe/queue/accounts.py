"""The ledger of all episodes, with a reason for each that ended untrained. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from asyncmoe.errors import InvariantBroken
from asyncmoe.queue.admission import Ledger


@dataclass(frozen=True)
class QueueStats:
    """Current contents and running totals of the queue; counts of episodes."""

    version: int
    depth: int
    running: int
    leased: int
    started: int
    accepted: int
    trained: int
    dropped: dict[str, int]
    rejected: dict[str, int]
    requeued: dict[str, int]
    demonstrations: int
    """Demonstrations waiting in the warm-up lane."""


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

    def reject(self, count: int, reason: str) -> Accounts:
        """Reject `count` running episodes: they are unusable."""
        return replace(self, ledger=self.ledger.reject(count), rejected=_plus(self.rejected, reason, count))

    def discard(self, count: int, reason: str) -> Accounts:
        """Drop `count` running episodes that are complete, but not worth queueing."""
        return replace(self, ledger=self.ledger.discard(count), dropped=_plus(self.dropped, reason, count))

    def drop(self, count: int, reason: str) -> Accounts:
        """Drop `count` queued episodes that the consumption rule refuses."""
        return replace(self, ledger=self.ledger.drop(count), dropped=_plus(self.dropped, reason, count))

    def skip(self, count: int, reason: str) -> Accounts:
        """Skip `count` leased episodes, which the trainer leaves untrained."""
        return replace(self, ledger=self.ledger.skip(count), skipped=_plus(self.skipped, reason, count))

    def requeue(self, count: int, reason: str) -> Accounts:
        """Requeue `count` queued episodes that the consumption rule refuses: they start again."""
        return replace(self, ledger=self.ledger.requeue(count), requeued=_plus(self.requeued, reason, count))

    @property
    def all_dropped(self) -> dict[str, int]:
        """Dropped episodes by reason, including those of skipped batches."""
        reasons = dict.fromkeys((*self.dropped, *self.skipped))
        return {reason: self.dropped.get(reason, 0) + self.skipped.get(reason, 0) for reason in reasons}

    def stats(self, version: int, demonstrations: int) -> QueueStats:
        """Return the counts, with the served version and the number of queued demonstrations."""
        count = self.ledger
        return QueueStats(
            version=version,
            depth=count.queued,
            running=count.running,
            leased=count.leased,
            started=count.started,
            accepted=count.accepted,
            trained=count.trained,
            dropped=self.all_dropped,
            rejected=dict(self.rejected),
            requeued=dict(self.requeued),
            demonstrations=demonstrations,
        )


def _plus(reasons: Mapping[str, int], reason: str, count: int) -> Mapping[str, int]:
    return {**reasons, reason: reasons.get(reason, 0) + count}
