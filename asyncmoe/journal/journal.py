"""The journal of one queue: what begins, finishes and ends, in the order in which it happens.

The promises, in the order of the file. A group's payload is on disk before its row says that it is queued; the row of a lease is on disk
before the trainer hears of it; rows come in the order of the queue's changes. So after any stop the file holds a state that the queue had.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from asyncmoe.errors import DataError, InvariantBroken
from asyncmoe.journal import payload, rows
from asyncmoe.journal.belonging import Belonging
from asyncmoe.journal.payload_store import PayloadStore
from asyncmoe.journal.recovery import (
    JournalRows,
    LeasedGroup,
    RecordedGroup,
    RecordedLease,
    Recovered,
    Reopened,
    recover,
    reopen,
    under_way,
)
from asyncmoe.journal.rows import Change
from asyncmoe.journal.segments import Segments
from asyncmoe.journal.states import States
from asyncmoe.journal.states_file import FILE
from asyncmoe.journal.turns import Turns
from asyncmoe.journal.unjournaled import Unjournaled
from asyncmoe.queue.accounts import Accounts
from asyncmoe.queue.group_buffer import Group
from asyncmoe.queue.start_order import Start
from asyncmoe.trajectory import Buffer

log = logging.getLogger(__name__)
SEGMENTS, TURNS = "segments", "turns"
"""Folders of the payloads of finished groups and of turns, in that of the journal."""
_WRITER = 0
"""Number of the journal's own process among those that write payloads; rollout workers have others."""
OF_TURNS = 4
"""Turns may take this fraction of the bound on payloads."""


@dataclass(frozen=True)
class Stores:
    """What a journal is kept in, and what closes it, the last opened first."""

    states: States
    payloads: PayloadStore
    turns: Turns | None
    held: ExitStack


class Journal(Unjournaled):
    """The journal of a run. For one event loop.

    Attributes:
        name: for messages: "journal /runs/7/journal".
        identity: of its segments.
        recorded: what it held when it was opened.
        needed: numbers of the segments that hold what is needed, by writer, since `forget`.
    """

    def __init__(self, name: str, belonging: Belonging, stores: Stores, recorded: JournalRows) -> None:
        """See `open`.

        Args:
            stores: which the journal closes.
        """
        self.name, self.recorded, self._belonging, self.turns = name, recorded, belonging, stores.turns
        self.identity = belonging.digest
        self._states, self._segments, self._held = stores.states, stores.payloads, stores.held
        self._accounts: Callable[[], Accounts] | None = None
        self._position = max((group.order for group in recorded.groups.values()), default=0)
        self._next, self._replays = recorded.next, dict[int, RecordedLease]()
        self._leases: dict[int, int] = {}
        self._newest_commit, self._settling = 0, asyncio.Lock()
        self.needed: Mapping[int, frozenset[int]] = {}
        self._writing: Counter[int] = Counter()
        places = [group.place for group in recorded.groups.values() if group.place is not None]
        self._newest = max((place.segment for place in places if place.writer == _WRITER), default=0)

    @classmethod
    def open(cls, folder: Path, belonging: Belonging, *, segment_bytes: int, max_bytes: int, turns: bool = True) -> Journal:
        """Open or make the journal of a folder. Blocks.

        Args:
            max_bytes: bound on the payloads of finished groups; turns may take a quarter of it besides.
            turns: whether the answers to episodes under way are kept.

        Raises:
            DataError: it is another run's, or damaged.
            UserError: another process has it open.
            StorageError: it cannot be written.
        """
        belonging.clear_if_empty(folder, folder / SEGMENTS, folder / TURNS)
        if belonging.begun and not (folder / FILE).exists():
            log.warning("%s is gone: what was queued or under way when the run stopped is sampled again", folder)
        with ExitStack() as held:
            states = States.open(folder, belonging.identity)
            held.callback(states.close)
            segments = Segments.open(folder / SEGMENTS, belonging.digest, segment_bytes=segment_bytes, max_bytes=max_bytes)
            held.callback(segments.close)
            recorded, answers = states.read(rows.read), None
            if turns:
                bounds = {"segment_bytes": segment_bytes, "max_bytes": max_bytes // OF_TURNS}
                answers = Turns.open(folder / TURNS, belonging.digest, under_way(recorded), **bounds)
                held.callback(answers.close)
            belonging.note()
            return cls(f"journal {folder}", belonging, Stores(states, segments, answers, held.pop_all()), recorded)

    def begin(self, step: int, base: int, batch: int, first_group: int, *, goes_on: bool = False) -> Recovered:
        """Return the state in which the queue begins; see `recover`.

        Args:
            first_group: number of the first group, if the journal is new.
        """
        if self.recorded.first is None:
            self.recorded = replace(self.recorded, first=max(step, base), next=first_group)
        found = recover(self.recorded, step, base, batch, self.name, goes_on=goes_on)
        self.lineage, self._next, self._replays = found.lineage, found.next, dict(found.replays)
        facts = {"lineage": found.lineage, "first": self.recorded.first, "next": found.next, "trained": step}
        # Together, or the next restart would take what the replays skipped out of the ledger a second time.
        self._states.write([rows.reopened(max(step, base)), *(rows.fact(name, value) for name, value in facts.items())], found.accounts)
        return found

    def follow(self, accounts: Callable[[], Accounts]) -> None:
        self._accounts = accounts

    def begun(self, group: Start) -> None:
        self._belonging.note(begun=True)
        changes = [rows.begun(group, self._moved(), self.lineage)]
        if group.number >= self._next:
            self._next = group.number + 1
            changes.append(rows.fact("next", self._next))
        self._write(changes)

    async def finished(self, group: Group) -> None:
        if group.place is not None:  # a rollout worker has written it
            await self._states.durable(self._write([rows.queued(group.number, group.arrival, len(group), group.place)], urgent=True))
            self._over(group.number)
            return
        parts: list[Buffer] = payload.encode(group)
        await self._segments.room(sum(memoryview(part).nbytes for part in parts))
        place = self._segments.append(parts)
        self._newest = max(self._newest, place.segment)
        self._writing[place.segment] += 1
        try:
            await self._segments.durable(place)
            ticket = self._write([rows.queued(group.number, group.arrival, len(group), place)], urgent=True)
        finally:
            self._writing[place.segment] -= 1
        await self._states.durable(ticket)
        self._over(group.number)

    def ended(self, number: int, state: str, reason: str) -> None:
        self._write([rows.ended(number, state, reason)])
        self._over(number)

    def again(self, group: Start, reason: str) -> None:
        self._write([rows.again(group, self._moved(), reason)])
        self._over(group.number)

    def leased(self, step: int, count: int, version: int, groups: Sequence[tuple[Group, float]]) -> None:
        held = tuple(LeasedGroup(group.number, weight, tuple(item.key for item in group.items)) for group, weight in groups)
        lease = RecordedLease(step, count, version, self.lineage, False, held)
        self._leases[step] = self._write(rows.leased(lease), urgent=True)

    async def granted(self, step: int) -> None:
        if (ticket := self._leases.get(step)) is not None:
            await self._states.durable(ticket)

    def committed(self, step: int, skipped: str = "") -> None:
        self._leases.pop(step, None)
        self._newest_commit = self._write([rows.committed(step, skipped), rows.fact("trained", step + 1)])

    def warmed_up(self, step: int) -> None:
        self._newest_commit = self._write([rows.fact("trained", step + 1)])

    async def settled(self) -> None:
        # In turn: all ranks commit a step at once, and one wait serves them all.
        async with self._settling:
            await self._states.durable(self._newest_commit)

    def released(self, step: int) -> None:
        if any(later > step for later in (*self._leases, *self._replays)):
            raise InvariantBroken(f"journal: the lease of step {step} is released before later ones, which would be replayed without it")
        self._leases.pop(step, None)
        self._write(rows.released(step))

    # ------------------------------------------------------------ after a restart

    async def now(self, step: int, base: int) -> Reopened:
        """Return what a trainer gets again that goes back to `step` while the queue goes on; see `recovery.reopen`.

        Nothing may be leased or committed until `reopened` is told.
        """
        self.recorded = await self._states.ask(rows.read)
        return reopen(self.recorded, step, base, self.name)

    def reopened(self, found: Reopened) -> None:
        # Together, or a restart of everything would take what the replays trained or skipped out of the ledger a second time.
        self.lineage, self._replays, self._leases = found.lineage, dict(found.replays), {}
        lost = min(found.replays, default=None)
        facts = [rows.fact("lineage", found.lineage), rows.fact("trained", found.step)]
        self._write([*([] if lost is None else [rows.reopened(lost)]), *facts], urgent=True)

    def replay(self, step: int) -> RecordedLease | None:
        """Return the lease to answer a step with, or None."""
        return self._replays.get(step)

    def replayed(self, step: int) -> None:
        """Note that the lease of a step is held again."""
        del self._replays[step]

    async def groups(self, numbers: Sequence[int]) -> tuple[Group, ...]:
        """Read recorded groups, as they were queued.

        Raises:
            DataError: a payload is damaged or absent.
        """
        return tuple(await asyncio.to_thread(lambda: [self._group(self.recorded.groups[number]) for number in numbers]))

    async def payload(self, group: Group) -> Group:
        place = group.place
        if place is None:
            return await super().payload(group)
        read = await asyncio.to_thread(self._segments.read, place)
        return payload.decode(read, group.arrival, f"{self.name}: group {group.number}")

    async def under_way(self) -> dict[int, int]:
        """Return the attempts of the groups that are begun and not finished, by number."""
        return under_way(await self._states.ask(rows.read))

    # ------------------------------------------------------------ checkpoints

    async def forget(self, floor: int, writers: int = 0) -> int:
        """Delete what no run needs that goes back no further than to the checkpoint of step `floor`.

        Args:
            writers: rollout workers 1 to `writers` are part of the run, and delete segments of their own (`needed`).

        Returns:
            the freed bytes.

        Raises:
            StorageError: a file could not be deleted.
        """
        # Payloads that are being written have no row yet; those written from now on lie in the newest segment or later ones.
        writing, newest = [number for number, count in self._writing.items() if count], self._newest
        self._states.write(rows.forgotten(floor), urgent=True)
        self.needed = needed = await self._states.ask(rows.segments)
        await self._states.compact()
        self._writing = +self._writing  # without the zeros
        freed = await asyncio.to_thread(self._segments.retain, {*needed.get(_WRITER, ()), *writing}, newest)
        return freed + await asyncio.to_thread(self._segments.retain_left, needed, writers)

    @property
    def size(self) -> int:
        """Bytes of the payloads on disk."""
        return self._segments.size

    def close(self) -> None:
        """Write what was handed over, and close all files. Blocks."""
        self._held.close()

    # ------------------------------------------------------------ internals

    def _write(self, changes: Sequence[Change], *, urgent: bool = False) -> int:
        ledger = None if self._accounts is None else self._accounts()
        return self._states.write(changes, ledger, urgent=urgent)

    def _over(self, group: int) -> None:
        if self.turns is not None:
            self.turns.over(group)

    def _moved(self) -> int:
        self._position += 1
        return self._position

    def _group(self, recorded: RecordedGroup) -> Group:
        assert recorded.place is not None
        name = f"{self.name}: group {recorded.number}"
        group = payload.decode(self._segments.read(recorded.place), recorded.order, name)
        if group.number != recorded.number or len(group) != recorded.episodes:
            got = f"group {group.number} of {len(group)} episodes"
            raise DataError(name, got=got, expected=f"group {recorded.number} of {recorded.episodes}")
        return group
