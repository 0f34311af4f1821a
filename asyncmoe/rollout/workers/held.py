"""The whole groups that a rollout worker holds: in memory, for the trainer's ranks, and in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec

from asyncmoe.config import Config
from asyncmoe.errors import ProtocolError
from asyncmoe.log.log import Log, Place
from asyncmoe.queue import payload
from asyncmoe.queue.group_buffer import Group, whole
from asyncmoe.rpc.worker_messages import WorkerFetch, WorkerPacked
from asyncmoe.trajectory import Buffer, Recording, Trajectory, part


class HeldGroups:
    """Groups from the moment that they are whole until they are over. For one event loop.

    Args:
        number: of the worker.

    Attributes:
        log: keeps the payloads; None: nobody does.
    """

    def __init__(self, config: Config, number: int, recording: Recording) -> None:
        self._config, self._number, self._recording = config, number, recording
        self.log: Log | None = None
        self._groups: dict[int, Group] = {}
        self._frames: dict[str, list[Buffer]] = {}
        self._writing: list[int] = []

    async def add(self, number: int, trajectories: Sequence[Trajectory], newest: int) -> WorkerPacked:
        """Check and hold a group; return once it is in the log.

        Raises:
            TrajectoryRejected: it is unfit for training.
            StorageError: the log cannot be written.
        """
        if number in self._groups:
            raise ProtocolError(f"WorkerPack: got group {number} twice")
        size = self._config.rollout.group_size
        group = await asyncio.to_thread(partial(whole, trajectories, size, self._recording, newest))
        group = self._groups[number] = await self._logged(group)
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

    async def retain(self, below: int | None) -> None:
        """Let go of the payloads before `below` (None: of all) but for those of groups that are held. Raises StorageError."""
        if self.log is not None:
            held = [group.place.position for group in self._groups.values() if group.place is not None]
            kept = min((*held, *self._writing), default=self.log.end)  # those that are written have no place yet
            await asyncio.to_thread(self.log.forget, kept if below is None else min(below, kept))

    def close(self) -> None:
        """Write what was handed over, and close the log. Blocks."""
        if self.log is not None:
            self.log.close()

    async def _logged(self, group: Group) -> Group:
        if self.log is None:
            return group
        position = await payload.write(self.log, group, self._writing)
        return replace(group, place=Place(self._number, position))
