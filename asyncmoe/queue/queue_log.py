"""The log of a queue: what starts, finishes and ends, in the order of the changes, and how a queue resumes from it.

Guarantees. A group's payload is durable before the record that queues it; the record of a lease is durable before the trainer receives the
lease; records are in the order of the queue's changes. So after any stop the log describes a state that the queue had.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence

from asyncmoe.errors import DataError
from asyncmoe.log.log import Log, Place
from asyncmoe.queue import payload, records
from asyncmoe.queue.accounts import Accounts
from asyncmoe.queue.fold import RecordedGroup, Recovered, fold, recover
from asyncmoe.queue.group_buffer import Group
from asyncmoe.queue.leases import LeaseTerms
from asyncmoe.queue.records import Start

log = logging.getLogger(__name__)
CONTROLLER, OWN = "0", 1
"""The controller's log, the only one with leases and commits; and the number of the first worker. Workers write payloads."""


class QueueLog:
    """The log of a run's queue. For use from one event loop.

    Args:
        changes: the controller's log.
        begun: called once, before the first group begins.

    Attributes:
        name: the log's name, for messages.
        state: the state that the records describe.
        history: number of restarts after which steps were trained again with other weights.
        replays: leases still to be granted again, by step.
        accounts: returns the queue's accounts, which go into every record.
    """

    def __init__(self, changes: Log, begun: Callable[[], None] = lambda: None) -> None:
        self._changes, self._begun, self.name = changes, begun, changes.name
        self.state = fold((at, records.entry(data)) for at, data in changes.read())
        self.state.damaged |= changes.damaged
        self.history = self.state.history
        self.accounts: Callable[[], Accounts | None] = lambda: None
        self.replays: dict[int, records.StepLeased] = {}
        self._decided = -1

    # ------------------------------------------------------------ the beginning

    def lost(self, step: int) -> frozenset[int]:
        """Return the groups that cannot be given to a trainer that has taken `step` steps. Blocks.

        Their payload is unreadable; or an earlier lease is lost, so the trainer will never again have the weights that sampled them.
        """
        needed = [one for one in self.state.groups.values() if one.place is not None and (one.step is None or one.step >= step)]
        newest: dict[int, float] = {}
        for one in needed:
            try:
                newest[one.number] = self._read(one.number, one.order, one.place).newest_version
            except DataError as error:
                log.error("%s", error)
                newest[one.number] = float("inf")
        unread, reached = {number for number, version in newest.items() if version == float("inf")}, step
        while (lease := self.state.leases.get(step)) is not None and lease.terms is not None and unread.isdisjoint(lease.numbers):
            step, reached = step + 1, lease.terms.version + 1
        return frozenset(number for number, version in newest.items() if version > reached)

    def begin(self, step: int, base: int, batch: int, first_group: int, lost: Collection[int] = (), *, same: bool = False) -> Recovered:
        """Repair damage and return the state in which the queue begins; see `recover`.

        Args:
            first_group: number of the first group, if the log is new.
            lost: see `lost`.
            same: see `recover`.
        """
        if self.state.first is None and not self.state.groups:
            self.state.next = max(self.state.next, first_group)
        found = recover(self.state, step, base, batch, self.name, lost, same=same)
        self.accounts = lambda: found.accounts
        for change in found.repairs:
            self._add(change)
        self.history, self.replays = found.history, dict(found.replays)
        self._stand(found.first, max(step, base))
        self.state.damaged = False
        return found

    # ------------------------------------------------------------ changes

    def starts(self, group: Start) -> None:
        """Record that sampling of a group begins, or is to begin again."""
        begun, self._begun = self._begun, lambda: None
        begun()
        self._add(group)

    async def finished(self, group: Group) -> None:
        """Wait until the record that queues a complete group is durable; the group's payload already is. Raises StorageError."""
        assert group.place is not None
        await self._changes.durable(self._add(records.GroupFinished(group.number, group.arrival, group.attempt, len(group), group.place)))

    def ended(self, number: int) -> None:
        """Record that a group is dropped or rejected, and does not start again."""
        self._add(records.GroupEnded(number))

    def leased(self, step: int, count: int, version: int, groups: Sequence[tuple[Group, float]]) -> None:
        """Record that groups are leased, with these factors on their weights."""
        held = []
        for group, weight in groups:
            keys = tuple(item.key for item in group.items)
            held.append(records.LeasedGroup(group.number, weight, keys, group.arrival, len(group), group.place or Place(OWN, 0)))
        self._decided = self._add(records.StepLeased(step, count, version, self.history, tuple(held)))

    def committed(self, step: int, skipped: str) -> None:
        """Record the end of a leased step: trained, or skipped for the reason given. Warm-up steps have no records."""
        if (lease := self.state.leases.get(step)) is not None:
            self._decided = self._add(records.StepCommitted(step, skipped, lease.numbers))

    async def settled(self) -> None:
        """Wait until all leases and commits so far are durable. Raises as `finished`."""
        await self._changes.durable(self._decided)

    # ------------------------------------------------------------ after a restart

    def reopening(self, step: int, base: int, batch: int, *, same: bool = False) -> Recovered:
        """Return what to replay to a trainer that returns to `step` while the queue lives on, and the ledger at that step; see `recover`.

        Nothing may be leased or committed until `reopened` is called.
        """
        self.state.accounts = self.accounts()
        return recover(self.state, step, base, batch, self.name, same=same)

    def reopened(self, found: Recovered) -> None:
        """Record that the trainer returns to a checkpoint, and replay its leases since; call it after `reopening`."""
        self.history, self.replays = found.history, dict(found.replays)
        self._stand(self.state.first or 0, min(found.replays, default=None))

    async def replayed(self, step: int, terms: LeaseTerms) -> tuple[tuple[Group, ...], list[float]] | None:
        """Return the groups of a lease to be replayed, and the factors on their weights; None: the step has no such lease.

        A lease is returned once, and read from disk only now. One call at a time.

        Raises:
            DataError: the trainer asks for different terms than originally, or a payload is damaged.
        """
        if (lease := self.replays.get(step)) is None:
            return None
        what = f"{self.name}: lease of step {step}"
        if (terms.count, terms.version) != (lease.count, lease.version):
            expected = f"{lease.count} at version {lease.version}, as when it was leased first"
            raise DataError(what, got=f"{terms.count} episodes at version {terms.version}", expected=expected)
        history, groups = self.history, await self.groups(lease.groups)
        for group, one in zip(groups, lease.groups, strict=True):
            if tuple(item.key for item in group.items) != one.keys:
                raise DataError(what, got=f"different trajectories in group {one.number}", expected=f"those first leased, {one.keys}")
        if (self.history, self.replays.get(step)) != (history, lease):
            return None  # the trainer that asked is lost, and the next one has other leases
        del self.replays[step]
        return groups, [one.weight for one in lease.groups]

    async def groups(self, recorded: Sequence[RecordedGroup | records.LeasedGroup]) -> tuple[Group, ...]:
        """Read groups as they were queued. Raises DataError if a payload is damaged or absent."""
        return tuple(await asyncio.to_thread(lambda: [self._read(one.number, one.order, one.place) for one in recorded]))

    # ------------------------------------------------------------ checkpoints

    async def forget(self, floor: int, recorded: int) -> int:
        """Free what no run resumed at step `floor` or later needs, except the batches of steps from `recorded` on; return the bytes freed.

        Workers free the payloads (`LogState.payloads`). Raises StorageError.
        """
        self.state.recorded = {step: one for step, one in self.state.recorded.items() if step >= recorded}
        await self._changes.durable(self._stand(max(floor, self.state.first or 0)))
        below = min((self.state.since, *(one.position for one in self.state.recorded.values())))
        return await asyncio.wrap_future(self._changes.forget(below))

    def close(self) -> None:
        """Flush all appended records, make them durable, and close the log. Blocks."""
        self._changes.close()

    # ------------------------------------------------------------ internals

    def _add(self, change: records.Change) -> int:
        """Append a record; return its position."""
        position = self._changes.append([records.encode(records.LogEntry(change, self.accounts()))])
        self.state.apply(position, change)
        return position

    def _stand(self, first: int, again: int | None = None) -> int:
        self.state.forget(first)
        return self._add(records.RunStands(first, self.state.next, self.history, self.state.needed(self._changes.end), again))

    def _read(self, number: int, arrival: int, place: Place | None) -> Group:
        assert place is not None
        group, _ = payload.decode(self._changes.read_at(place.position, str(place.writer)), arrival, place)
        if group.number != number:
            raise DataError(f"{self.name}: group {number}", got=f"group {group.number} at {place}", expected=f"group {number}")
        return group
