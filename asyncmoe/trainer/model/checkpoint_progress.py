"""What a save is at, by what its ranks have reported: pure functions over plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec


class PlacedShard(msgspec.Struct, frozen=True, array_like=True):
    """Where a shard lies in a rank's file. `offset` is its corner in the whole tensor; None for an object that is no tensor."""

    name: str
    offset: tuple[int, ...] | None
    begin: int
    nbytes: int


class Written(msgspec.Struct, frozen=True, array_like=True):
    """A rank's report: its file, with size and CRC-32C; or why there is none.

    Attributes:
        storage: the failure is one of storage, and `failure` says to the user what to do.
    """

    file: str = ""
    nbytes: int = 0
    crc32c: int = 0
    shards: tuple[PlacedShard, ...] = ()
    failure: str = ""
    storage: bool = False


class SaveOutcome(msgspec.Struct, frozen=True, array_like=True):
    """How a save has ended, the same on every rank: `failure` of rank `rank`, or none."""

    failure: str = ""
    storage: bool = False
    rank: int = 0


State = Literal["writing", "whole", "failed"]


def state_of(reports: Mapping[int, Written], world: int) -> State:
    """Return what the reports make of a save of `world` ranks: it fails with the first failure, and is whole with the last report."""
    if any(report.failure for report in reports.values()):
        return "failed"
    return "whole" if set(range(world)) <= reports.keys() else "writing"


def failure_of(reports: Mapping[int, Written]) -> SaveOutcome:
    """Return the verdict on a failed save: storage's failure before others, because others may follow from it; then the lowest rank's."""
    failed = [(not report.storage, rank) for rank, report in reports.items() if report.failure]
    if not failed:
        return SaveOutcome()
    _, rank = min(failed)
    return SaveOutcome(reports[rank].failure, reports[rank].storage, rank)


class Patience:
    """Says when to stop waiting for others: when nothing has moved for a while, however long the whole takes.

    Args:
        limit_s: seconds without a change.
        now: seconds of the clock that `over` is asked with.

    Attributes:
        changes: how often something has moved.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s, self._since = limit_s, now
        self._seen: object = None
        self.changes = 0

    def over(self, seen: object, now: float) -> bool:
        """Return whether `seen` has been the same for `limit_s`."""
        if seen != self._seen:
            self._seen, self._since = seen, now
            self.changes += 1
        return now - self._since >= self._limit_s
