"""What a queue tells its journal, and a queue without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncmoe.errors import DataError
from asyncmoe.journal.recovery import Reopened
from asyncmoe.journal.turns import Turns
from asyncmoe.queue.accounts import Accounts
from asyncmoe.queue.group_buffer import Group
from asyncmoe.queue.start_order import Start


class Unjournaled:
    """A queue without a journal: nothing is kept. `Journal` overrides all of it.

    Attributes:
        lineage: number of restarts after which steps were trained again.
        turns: the answers to episodes under way, if they are kept.
    """

    lineage = 0
    turns: Turns | None = None

    def follow(self, accounts: Callable[[], Accounts]) -> None:
        """Take the ledger from this function at every change."""

    def begun(self, group: Start) -> None:
        """Sampling of a group begins."""

    async def finished(self, group: Group) -> None:
        """Return once a whole group is on disk, first its payload, then its row; the group may be queued then.

        Raises:
            StorageError: the disk failed, or the journal is full.
        """

    async def payload(self, group: Group) -> Group:
        """Return a group that this process does not hold, with its frames.

        Raises:
            DataError: its payload is damaged, or there is no journal.
        """
        raise DataError(f"group {group.number}", got="no journal", expected="one, because the rollout worker that held it is lost")

    def ended(self, number: int, state: str, reason: str) -> None:
        """A group is "dropped" or "rejected", and does not start again."""

    def again(self, group: Start, reason: str) -> None:
        """A group is to start again, as `group` says."""

    def leased(self, step: int, count: int, version: int, groups: Sequence[tuple[Group, float]]) -> None:
        """Groups are leased, with these factors on their weights."""

    async def granted(self, step: int) -> None:
        """Return once the lease of a step is on disk. Raises as `finished`."""

    def committed(self, step: int, skipped: str = "") -> None:
        """The step of a lease is over: the trainer has trained on it, or has skipped it for this reason."""

    def warmed_up(self, step: int) -> None:
        """A step of the warm-up is over."""

    async def settled(self) -> None:
        """Return once the steps that are over so far are on disk as such. Raises as `finished`."""

    def released(self, step: int) -> None:
        """A lease ends untrained. Raises InvariantBroken if a later one does not."""

    def reopened(self, found: Reopened) -> None:
        """The trainer goes back to a checkpoint, and is answered with its leases since then; follows `Journal.now`."""
