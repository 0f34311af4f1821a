"""A journal that knows only the groups of some stretches of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncmoe.journal.journal import Journal
from asyncmoe.journal.unjournaled import Unjournaled
from benchmarks.stretches import on

if TYPE_CHECKING:
    from asyncmoe.queue.accounts import Accounts
    from asyncmoe.queue.group_buffer import Group
    from asyncmoe.queue.start_order import Start


@dataclass(frozen=True)
class _TurnsInStretches:
    turns: Any
    per_step: int

    async def record(self, key: Any, request: bytes, answer: bytes) -> None:
        if on(key.group, self.per_step):
            await self.turns.record(key, request, answer)

    async def recall(self, key: Any, request: bytes) -> bytes | None:
        found: bytes | None = await self.turns.recall(key, request) if on(key.group, self.per_step) else None
        return found


class JournalInStretches(Unjournaled):
    """Passes on what concerns groups that begin in a stretch with (`benchmarks.stretches.on`), and the leases of such groups."""

    def __init__(self, journal: Journal, per_step: int) -> None:
        self._journal, self._per_step = journal, per_step
        self._leased: set[int] = set()
        self.turns = _TurnsInStretches(journal.turns, per_step)  # type: ignore[assignment]

    def follow(self, accounts: Callable[[], Accounts]) -> None:
        self._journal.follow(accounts)

    def begun(self, group: Start) -> None:
        if on(group.number, self._per_step):
            self._journal.begun(group)

    async def finished(self, group: Group) -> None:
        if on(group.number, self._per_step):
            await self._journal.finished(group)

    def ended(self, number: int, state: str, reason: str) -> None:
        if on(number, self._per_step):
            self._journal.ended(number, state, reason)

    def again(self, group: Start, reason: str) -> None:
        if on(group.number, self._per_step):
            self._journal.again(group, reason)

    def leased(self, step: int, count: int, version: int, groups: Sequence[tuple[Group, float]]) -> None:
        known = [one for one in groups if on(one[0].number, self._per_step)]
        if known:
            self._leased.add(step)
            self._journal.leased(step, count, version, known)

    async def granted(self, step: int) -> None:
        if step in self._leased:
            await self._journal.granted(step)

    def committed(self, step: int, skipped: str = "") -> None:
        if step in self._leased:
            self._leased.discard(step)
            self._journal.committed(step, skipped)
