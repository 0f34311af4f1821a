"""What a queue tells its log, and what it goes on with: what begins, finishes and ends, in the order in which it happens.

The promises. A group's payload is durable before its record says that it is queued; the record of a lease is durable before the trainer
hears of it; records come in the order of the queue's changes. So after any stop the log holds a state that the queue had.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from asyncmoe.errors import DataError
from asyncmoe.log.log import Log, Place
from asyncmoe.queue import payload, records
from asyncmoe.queue.accounts import Accounts
from asyncmoe.queue.fold import DAMAGED, LogState, RecordedGroup, Recovered, Reopened, fold, recover, reopen
from asyncmoe.queue.group_buffer import Group
from asyncmoe.queue.records import Change, LeasedGroup
from asyncmoe.queue.start_order import Start

log = logging.getLogger(__name__)
CONTROLLER, OWN = "0", 1
"""The log of the controller, which alone has leases and commits; and the number of the first worker, which write payloads."""


class QueueLog:
    """The log of a run's queue. For one event loop.

    Args:
        changes: the controller's log; None: nothing is kept.
        begun: called once, before a group begins.

    Attributes:
        name: for messages.
        state: what the records tell.
        history: number of restarts after which steps were trained again.
        cpu_s: CPU seconds that the event loop has spent on it.
    """

    def __init__(self, changes: Log | None = None, begun: Callable[[], None] = lambda: None) -> None:
        self._changes, self._begun = changes, begun
        self.name, self.cpu_s = "no log" if changes is None else changes.name, 0.0
        self.state = LogState() if changes is None else fold(_entries(changes))
        self.state.damaged |= changes is not None and changes.damaged
        self.history = self.state.history
        self._accounts: Callable[[], Accounts] | None = None
        self._replays: dict[int, records.StepLeased] = {}
        self._granted: dict[int, int] = {}
        self._newest_commit = -1

    # ------------------------------------------------------------ the beginning

    def lost(self, step: int) -> frozenset[int]:
        """Return the groups that a trainer of `step` steps cannot be given. Blocks.

        Their payload cannot be read; or weights sampled them that the trainer does not come to again, because a lease before is lost.
        """
        needed = [one for one in self.state.groups.values() if one.place is not None and (one.step is None or one.step >= step)]
        newest = {one.number: self._newest_version(one) for one in needed}
        lost, reached = {number for number, version in newest.items() if version is None}, step
        while (lease := self.state.leases.get(step)) is not None and lease.terms is not None and lost.isdisjoint(lease.numbers):
            step, reached = step + 1, lease.terms.version + 1
        return frozenset(lost | {number for number, version in newest.items() if version is not None and version > reached})

    def begin(self, step: int, base: int, batch: int, first_group: int, lost: Collection[int] = ()) -> Recovered:
        """Return the state in which the queue begins; see `recover`.

        Args:
            first_group: number of the first group, if the log is new.
            lost: see `lost`.
        """
        reached = max(step, base)
        if self.state.first is None and not self.state.groups:
            self.state.next = max(self.state.next, first_group)
        found = recover(self.state, step, base, batch, self.name, lost)
        self._accounts = lambda: found.accounts
        for number in found.dropped:
            self._add(records.GroupEnded(number, "dropped", DAMAGED))
        for start in [one for one in found.starts if one.number in lost]:
            self._add(records.GroupAgain(start.number, start.attempt, start.failures, DAMAGED))
        for later in sorted(at for at in self.state.leases if at >= reached and at not in found.replays):
            self._add(records.StepReleased(later))
        self.history, self._replays = found.history, dict(found.replays)
        self._stand(found.first, reached)
        self.state.damaged = False
        return found

    def follow(self, accounts: Callable[[], Accounts]) -> None:
        """Take the ledger from this function at every change."""
        self._accounts = accounts

    # ------------------------------------------------------------ changes

    def begun(self, group: Start) -> None:
        """Sampling of a group begins."""
        begun, self._begun = self._begun, lambda: None
        begun()
        self._add(records.GroupBegun(group.number, group.attempt, group.failures, self.history))

    async def finished(self, group: Group) -> None:
        """Return once the record of a whole group, whose payload is durable, is so too; it may be queued then. Raises StorageError."""
        if group.place is not None:
            await self._durable(self._add(records.GroupFinished(group.number, group.arrival, group.attempt, len(group), group.place)))

    def ended(self, number: int, state: str, reason: str) -> None:
        """A group is "dropped" or "rejected", and does not start again."""
        self._add(records.GroupEnded(number, "dropped" if state == "dropped" else "rejected", reason))

    def again(self, group: Start, reason: str) -> None:
        """A group is to start again, as `group` says."""
        self._add(records.GroupAgain(group.number, group.attempt, group.failures, reason))

    def leased(self, step: int, count: int, version: int, groups: Sequence[tuple[Group, float]]) -> None:
        """Groups are leased, with these factors on their weights."""
        if self._changes is not None:
            held = []
            for group, weight in groups:
                keys, place = tuple(item.key for item in group.items), self.state.groups[group.number].place
                held.append(LeasedGroup(group.number, weight, keys, group.arrival, len(group), place or Place(OWN, 0)))
            self._granted[step] = self._add(records.StepLeased(step, count, version, self.history, tuple(held)))

    async def granted(self, step: int) -> None:
        """Return once the lease of a step is durable. Raises as `finished`."""
        if (position := self._granted.get(step)) is not None:
            await self._durable(position)

    def committed(self, step: int, skipped: str = "") -> None:
        """The step of a lease is over: the trainer has trained on it, or has skipped it for this reason. Of the warm-up there is none."""
        self._granted.pop(step, None)
        if (lease := self.state.leases.get(step)) is not None:
            self._newest_commit = self._add(records.StepCommitted(step, skipped, lease.numbers))

    async def settled(self) -> None:
        """Return once the steps that are over so far are durable as such. Raises as `finished`."""
        await self._durable(self._newest_commit)

    # ------------------------------------------------------------ after a restart

    def reopening(self, step: int, base: int) -> Reopened:
        """Return what a trainer gets again that goes back to `step` while the queue goes on; see `fold.reopen`.

        Nothing may be leased or committed until `reopened` is told.
        """
        return reopen(self.state, step, base, self.name)

    def reopened(self, found: Reopened) -> None:
        """The trainer goes back to a checkpoint, and is answered with its leases since then; follows `reopening`."""
        self.history, self._replays, self._granted = found.history, dict(found.replays), {}
        self._stand(self.state.first or 0, min(found.replays, default=None))

    def replay(self, step: int) -> records.StepLeased | None:
        """Return the lease to answer a step with, or None."""
        return self._replays.get(step)

    def replayed(self, step: int) -> None:
        """Note that the lease of a step is held again."""
        del self._replays[step]

    async def groups(self, recorded: Sequence[RecordedGroup | LeasedGroup]) -> tuple[Group, ...]:
        """Read groups, as they were queued, without their frames. Raises DataError: a payload is damaged or absent."""
        return tuple(await asyncio.to_thread(lambda: [self._read(one.number, one.order, one.place) for one in recorded]))

    # ------------------------------------------------------------ checkpoints

    async def forget(self, floor: int) -> int:
        """Let go of what no run needs that goes back no further than to the checkpoint of step `floor`; return the freed bytes.

        Workers let go of payloads (`LogState.payloads`). Raises StorageError.
        """
        if self._changes is None:
            return 0
        first = max(floor, self.state.first or 0)
        self.state.forget(first)
        stands = self._stand(first)
        await self._durable(stands)
        since = self.state.needed
        return await asyncio.to_thread(self._changes.forget, stands if since is None else min(since, stands))

    def close(self) -> None:
        """Make durable what was handed over, and close the log. Blocks."""
        if self._changes is not None:
            self._changes.close()
        log.info("%s: %.2f s of CPU time beside its threads", self.name, self.cpu_s)

    # ------------------------------------------------------------ internals

    def _add(self, change: Change) -> int:
        """Hand over a record; return its position."""
        if self._changes is None:
            return -1
        began = time.thread_time()
        position = self._changes.append([records.encode(records.LogEntry(change, None if self._accounts is None else self._accounts()))])
        self.state.apply(position, change)
        self.cpu_s += time.thread_time() - began
        return position

    async def _durable(self, position: int) -> None:
        if self._changes is not None:
            await self._changes.durable(position)

    def _stand(self, first: int, again: int | None = None) -> int:
        assert self._changes is not None
        since = self.state.needed
        since = self._changes.end if since is None else since
        return self._add(records.RunStands(first, self.state.next, self.history, since, again))

    def _newest_version(self, one: RecordedGroup) -> int | None:
        """Return the newest version that sampled a token of a group; None: its payload cannot be read."""
        try:
            return self._read(one.number, one.order, one.place).newest_version
        except DataError as error:
            log.error("%s", error)
            return None

    def _read(self, number: int, arrival: int, place: Place | None) -> Group:
        name = f"{self.name}: group {number}"
        if place is None or self._changes is None:
            raise DataError(f"group {number}", got="no log", expected="one, because the rollout worker that held it is lost")
        group = replace(payload.decode(self._changes.read_at(place.position, str(place.writer)), arrival, name), frames={}, place=place)
        if group.number != number:
            raise DataError(name, got=f"group {group.number} at {place}", expected=f"group {number}")
        return group


def _entries(changes: Log) -> Iterator[tuple[int, records.LogEntry]]:
    for position, data in changes.read():
        yield position, records.entry(data, f"{changes.name} position {position}")
