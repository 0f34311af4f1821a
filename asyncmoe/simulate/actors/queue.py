"""The queue: bounded, oldest first; groups wait outside while it is full, and stale groups are dropped."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from asyncmoe.simulate.state import RunState, SimulatedGroup

QueuedGroup = tuple[float, int, SimulatedGroup]
"""Oldest version, arrival, group."""


class SimulatedQueue:
    """Complete groups between scorer and trainer."""

    def __init__(self, state: RunState) -> None:
        self._state, self._size, self._batch = state, state.plant.group_size, state.plant.batch
        self._outside: deque[SimulatedGroup] = deque()
        self._queued: list[QueuedGroup] = []
        self._arrivals = 0

    def put(self, group: SimulatedGroup) -> None:
        """Add a group to those that wait for space; `admit` lets it in."""
        self._outside.append(group)

    def admit(self) -> None:
        """Let in waiting groups, first come first served, while there is space."""
        state = self._state
        while self._outside and state.ledger.queued + state.ledger.leased + self._size <= state.capacity:
            group = self._outside.popleft()
            self._arrivals += 1
            heappush(self._queued, (group.oldest, self._arrivals, group))
            state.ledger = state.ledger.accept(self._size)

    def drop_stale(self) -> bool:
        """Drop groups that are too old for the next step; True if there were any."""
        state, stale = self._state, 0
        while self._queued and state.law.is_stale(int(self._queued[0][0]), state.steps):
            heappop(self._queued)[2].end()
            stale += self._size
        if stale:
            state.ledger = state.ledger.drop(stale)
            state.trace.dropped["stale"] += stale
        return bool(stale)

    def lease(self) -> list[QueuedGroup] | None:
        """Return the oldest groups, a batch of them; None if fewer are queued."""
        if self._state.ledger.queued < self._batch:
            return None
        self._state.ledger = self._state.ledger.lease(self._batch)
        return [heappop(self._queued) for _ in range(self._state.plant.groups_per_step)]

    def release(self, lease: list[QueuedGroup]) -> None:
        """Take back the groups of an untrained lease."""
        for entry in lease:
            heappush(self._queued, entry)
        self._state.ledger = self._state.ledger.release(self._batch)
        self._state.trace.releases += 1
