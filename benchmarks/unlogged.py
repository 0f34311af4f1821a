"""A queue without a log."""

from __future__ import annotations

from asyncmoe.queue import records
from asyncmoe.queue.fold import LogState
from asyncmoe.queue.group_buffer import Group
from asyncmoe.queue.queue_log import QueueLog


class Unlogged(QueueLog):
    """A log that discards every record."""

    def __init__(self) -> None:
        self.name, self.state, self.history, self.replays, self._decided = "no log", LogState(), 0, {}, -1
        self._begun = lambda: None

    async def finished(self, group: Group) -> None:
        pass

    def _add(self, change: records.Change) -> int:
        return -1

    async def settled(self) -> None:
        pass
