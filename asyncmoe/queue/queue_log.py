"""What a queue tells its log, and what it goes on with: what begins, finishes and ends, in the order in which it happens.

The promises. A group's payload is durable before its record says that it is queued; the record of a lease is durable before the trainer
hears of it; records come in the order of the queue's changes. So after any stop the log holds a state that the queue had.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

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
"""The log of the controller, which alone has leases and commits; and the number of the first worker, which write payloads."""


@dataclass(frozen=True)
class Resumption:
    """What an earlier process left to a queue: the state in which it begins.

    Attributes:
        accounts: none running; None: nothing was left.
        queued: groups to queue, by arrival.
        starts: groups to start before any new one.
        arrivals: number of the newest arrival.
        served: newest version that an earlier process may have published.
    """

    accounts: Accounts | None = None
    queued: Sequence[Group] = ()
    starts: Sequence[Start] = ()
    arrivals: int = 0
    served: int = 0


UNDISTURBED = Resumption()
"""Nothing was left."""


class QueueLog:
    """The log of a run's queue. For one event loop.

    Args:
        changes: the controller's log.
        begun: called once, before a group begins.

    Attributes:
        name: for messages.
        state: what the records tell.
        history: number of restarts after which steps were trained again.
        replays: leases that are answered again and that no step holds yet, by step.
        accounts: returns the queue's ledger, which goes into every record.
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
        """Return the groups that a trainer of `step` steps cannot be given. Blocks.

        Their payload cannot be read; or weights sampled them that the trainer does not come to again, because a lease before is lost.
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

    def begin(self, step: int, base: int, batch: int, first_group: int, lost: Collection[int] = ()) -> Recovered:
        """Return the state in which the queue begins; see `recover`.

        Args:
            first_group: number of the first group, if the log is new.
            lost: see `lost`.
        """
        if self.state.first is None and not self.state.groups:
            self.state.next = max(self.state.next, first_group)
        found = recover(self.state, step, base, batch, self.name, lost)
        self.accounts = lambda: found.accounts
        for change in found.repairs:
            self._add(change)
        self.history, self.replays = found.history, dict(found.replays)
        self._stand(found.first, max(step, base))
        self.state.damaged = False
        return found

    # ------------------------------------------------------------ changes

    def begun(self, group: Start) -> None:
        """Sampling of a group begins."""
        begun, self._begun = self._begun, lambda: None
        begun()
        self._add(group)

    async def finished(self, group: Group) -> None:
        """Return once the record of a whole group, whose payload is durable, is so too; it may be queued then. Raises StorageError."""
        assert group.place is not None
        await self._durable(self._add(records.GroupFinished(group.number, group.arrival, group.attempt, len(group), group.place)))

    def ended(self, number: int) -> None:
        """A group is dropped or rejected, and does not start again."""
        self._add(records.GroupEnded(number))

    def again(self, group: Start) -> None:
        """A group is to start again, as `group` says."""
        self._add(group)

    def leased(self, step: int, count: int, version: int, groups: Sequence[tuple[Group, float]]) -> None:
        """Groups are leased, with these factors on their weights."""
        held = []
        for group, weight in groups:
            keys = tuple(item.key for item in group.items)
            held.append(records.LeasedGroup(group.number, weight, keys, group.arrival, len(group), group.place or Place(OWN, 0)))
        self._decided = self._add(records.StepLeased(step, count, version, self.history, tuple(held)))

    def committed(self, step: int, skipped: str = "") -> None:
        """The step of a lease is over: the trainer has trained on it, or has skipped it for this reason. Of the warm-up there is none."""
        if (lease := self.state.leases.get(step)) is not None:
            self._decided = self._add(records.StepCommitted(step, skipped, lease.numbers))

    async def settled(self) -> None:
        """Return once all leases and commits so far are durable. Raises as `finished`."""
        await self._durable(self._decided)

    # ------------------------------------------------------------ after a restart

    def reopening(self, step: int, base: int, batch: int) -> Recovered:
        """Return what a trainer gets again that goes back to `step` while the queue goes on, and the ledger of what is over; see `recover`.

        Nothing may be leased or committed until `reopened` is told.
        """
        self.state.accounts = self.accounts()
        return recover(self.state, step, base, batch, self.name)

    def reopened(self, found: Recovered) -> None:
        """The trainer goes back to a checkpoint, and is answered with its leases since then; follows `reopening`."""
        self.history, self.replays = found.history, dict(found.replays)
        self._stand(self.state.first or 0, min(found.replays, default=None))

    async def replayed(self, step: int, terms: LeaseTerms) -> tuple[tuple[Group, ...], list[float]] | None:
        """Return the groups of a lease that is to be answered again, and the factors on their weights; None: the step has none.

        A lease is returned once, and read from disk only now. One call at a time.

        Raises:
            DataError: the trainer asks for other terms than then, or a payload is damaged.
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
                raise DataError(what, got=f"other trajectories in group {one.number}", expected=f"{one.keys}")
        if (self.history, self.replays.get(step)) != (history, lease):
            return None  # the trainer that asked is lost, and the leases of the next one are others
        del self.replays[step]
        return groups, [one.weight for one in lease.groups]

    async def groups(self, recorded: Sequence[RecordedGroup | records.LeasedGroup]) -> tuple[Group, ...]:
        """Read groups, as they were queued. Raises DataError: a payload is damaged or absent."""
        return tuple(await asyncio.to_thread(lambda: [self._read(one.number, one.order, one.place) for one in recorded]))

    # ------------------------------------------------------------ checkpoints

    async def forget(self, floor: int) -> int:
        """Let go of what no run needs that goes back no further than to the checkpoint of step `floor`; return the freed bytes.

        Workers let go of payloads (`LogState.payloads`). Raises StorageError.
        """
        await self._changes.durable(self._stand(max(floor, self.state.first or 0)))
        return await asyncio.wrap_future(self._changes.forget(self.state.since))

    def close(self) -> None:
        """Make durable what was handed over, and close the log. Blocks."""
        self._changes.close()

    # ------------------------------------------------------------ internals

    def _add(self, change: records.Change) -> int:
        """Hand over a record; return its position."""
        position = self._changes.append([records.encode(records.LogEntry(change, self.accounts()))])
        self.state.apply(position, change)
        return position

    async def _durable(self, position: int) -> None:
        await self._changes.durable(position)

    def _stand(self, first: int, again: int | None = None) -> int:
        self.state.forget(first)
        return self._add(records.RunStands(first, self.state.next, self.history, self.state.needed(self._changes.end), again))

    def _read(self, number: int, arrival: int, place: Place | None) -> Group:
        assert place is not None
        group, _ = payload.decode(self._changes.read_at(place.position, str(place.writer)), arrival, place)
        if group.number != number:
            raise DataError(f"{self.name}: group {number}", got=f"group {group.number} at {place}", expected=f"group {number}")
        return group
