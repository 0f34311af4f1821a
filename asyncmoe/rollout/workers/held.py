"""The whole groups that a rollout worker holds: in memory, for the trainer's ranks, and in the journal."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from asyncmoe.config import Config
from asyncmoe.errors import ProtocolError
from asyncmoe.journal import payload
from asyncmoe.journal.journal import SEGMENTS
from asyncmoe.journal.segments import Segments
from asyncmoe.queue.group_buffer import Group, whole
from asyncmoe.rpc.worker_messages import WorkerFetch, WorkerPacked
from asyncmoe.trajectory import Buffer, Recording, Trajectory, part


class HeldGroups:
    """Groups from the moment that they are whole until they are over. For one event loop.

    Args:
        number: of the worker.
    """

    def __init__(self, config: Config, number: int, recording: Recording) -> None:
        self._config, self._number, self._recording = config, number, recording
        self._segments: Segments | None = None
        self._groups: dict[int, Group] = {}
        self._frames: dict[str, list[Buffer]] = {}
        self._writing: Counter[int] = Counter()

    def open(self, identity: str) -> None:
        """Open this worker's segments of the journal. Blocks. Raises as `Segments.open`."""
        section = self._config.journal
        bounds = {"segment_bytes": section.segment_bytes, "max_bytes": section.max_bytes}
        self._segments = Segments.open(section.place(self._config.run.dir) / SEGMENTS, identity, writer=self._number, **bounds)

    async def add(self, number: int, trajectories: Sequence[Trajectory], newest: int) -> WorkerPacked:
        """Check and hold a group; return once it is in the journal.

        Raises:
            TrajectoryRejected: it is unfit for training.
            StorageError: the journal cannot be written.
        """
        if number in self._groups:
            raise ProtocolError(f"WorkerPack: got group {number} twice")
        size = self._config.rollout.group_size
        group = await asyncio.to_thread(partial(whole, trajectories, size, self._recording, newest))
        group = self._groups[number] = await self._journaled(group)
        self._frames.update(group.frames)
        return WorkerPacked(tuple(msgspec.structs.replace(item, holder=self._number) for item in group.items), group.attempt, group.place)

    def fetch(self, asked: WorkerFetch) -> list[Buffer]:
        """Return encoded frames of trajectories, as `asyncmoe.queue.bounded.BoundedQueue.fetch`. Raises ProtocolError."""
        unknown = [key for key in asked.keys if key not in self._frames]
        if unknown:
            raise ProtocolError(f"fetch: rollout worker {self._number} does not hold {unknown[0]}")
        return [frame for key in asked.keys for frame in part(self._frames[key], asked.layers, asked.masks)]

    def over(self, number: int) -> None:
        """Forget a group, if it is held."""
        if (group := self._groups.pop(number, None)) is not None:
            for key in group.keys:
                del self._frames[key]

    async def retain(self, live: Iterable[int], below: int) -> None:
        """Delete the segments below `below` that are not in `live`, and have no group that is held. Raises StorageError."""
        if self._segments is not None:
            held = {group.place.segment for group in self._groups.values() if group.place is not None}
            writing = [number for number, count in self._writing.items() if count]  # these payloads have no group yet
            await asyncio.to_thread(self._segments.retain, {*live, *held, *writing}, min(below, self._segments.newest))

    def close(self) -> None:
        """Write what was handed over, and close the segments. Blocks."""
        if self._segments is not None:
            self._segments.close()

    async def _journaled(self, group: Group) -> Group:
        if (segments := self._segments) is None:
            return group
        parts = payload.encode(group)
        await segments.room(sum(memoryview(one).nbytes for one in parts))
        place = segments.append(parts)
        self._writing[place.segment] += 1
        try:
            await segments.durable(place)
        finally:
            self._writing[place.segment] -= 1
        return replace(group, place=place)
