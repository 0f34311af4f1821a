"""The batches that a run trained on, read from its log: also while the run is alive, and after it was moved or copied.

Here a step's number is that of its lease. For users, and in `records.TrainedStep`, the step is one higher: the steps taken, it included.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from operator import itemgetter
from pathlib import Path

import msgspec

from asyncmoe import installed
from asyncmoe.config.log import LogSection
from asyncmoe.errors import DataError
from asyncmoe.log import belonging
from asyncmoe.log.files import FileReader
from asyncmoe.log.log import Place, Reader
from asyncmoe.queue import payload, records
from asyncmoe.queue.fold import LogState
from asyncmoe.queue.group_buffer import Frames, Group, weighed
from asyncmoe.queue.queue_log import CONTROLLER
from asyncmoe.rpc.item import Item
from asyncmoe.rpc.messages import Leased
from asyncmoe.trajectory import Buffer, part

_PATIENCE_S = 5.0
"""Seconds to wait for a Redis server."""


class Batches:
    """The batches that a run trained on. Changes nothing, takes no lock. Holds the batch that was asked for last, as it is in the log.

    Args:
        section: of the configuration for the directory in which the run is now (`asyncmoe.config.moved.of_run`).

    Attributes:
        leases: the newest lease of each step.
        ended: why a step's batch was left untrained, "" if it was trained; a step that is not over has no entry.

    Raises:
        DataError: the run has no log, or it cannot be read.
        UserError, StorageError: its Redis server refuses or does not answer.
    """

    def __init__(self, run_dir: Path, section: LogSection) -> None:
        self._run_dir, self._reader = run_dir, reader_of(run_dir, section)
        state = LogState()
        for position, _, data in self._reader.found(CONTROLLER):
            match change := None if data is None else records.entry(data).change:
                case records.StepLeased() | records.StepCommitted() | records.StepReleased():
                    state.apply(position, change)
                case records.RunStands(again=int()):
                    state.apply(position, msgspec.structs.replace(change, first=0))  # leases that the queue has forgotten count too
        self.leases = {step: one.terms for step, one in sorted(state.leases.items()) if one.terms is not None}
        self.ended = {step: one.ended for step, one in state.leases.items() if one.ended is not None}
        self._held = dict[Place, tuple[Group, Frames]]()
        self._step: int | None = None

    @cached_property
    def kept(self) -> list[int]:
        """The steps whose batches the log still has, as far as its positions show, ascending. No payload is read."""
        writers = {one.place.writer for lease in self.leases.values() for one in lease.groups}
        spans = {writer: self._reader.spans(str(writer)) for writer in writers}
        return [n for n, lease in self.leases.items() if all(_within(spans[one.place.writer], one.place.position) for one in lease.groups)]

    def leased(self, step: int) -> Leased:
        """Return a step's batch as `asyncmoe.queue.bounded.BoundedQueue.lease` returns one that is leased again.

        Raises:
            DataError: the log does not have the step, or a payload is damaged, gone, or another group's.
            StorageError: its Redis server does not answer.
        """
        if (lease := self.leases.get(step)) is None:
            got = "a step that is no longer kept" if step < min(self.leases, default=0) else "a step whose batch was never leased"
            expected = f"a step from {min(self.kept, default=-1) + 1} to {max(self.kept, default=-1) + 1}"
            raise DataError(f"step {step + 1} of {self._run_dir}", got=got, expected=expected)
        if step != self._step:
            self._held, self._step = {one.place: self._decoded(step, one) for one in lease.groups}, step
        items = tuple(item for one in lease.groups for item in weighed(self._held[one.place][0], one.weight))
        return Leased(step, items, 0, {}, lineage=lease.history, replayed=True)

    def frames(self, items: Sequence[Item], layers: tuple[int, ...] | None, masks: bool) -> list[Buffer]:
        """Return the frames of trajectories of the batch last returned by `leased`, in the order of `items`, as
        `asyncmoe.trainer.data.held.fetch` does.

        Raises:
            ProtocolError: see `asyncmoe.trajectory.part`.
        """
        return [frame for item in items if item.place for frame in part(self._held[item.place][1][item.key], layers, masks)]

    def payload(self, step: int, group: records.LeasedGroup) -> Buffer:
        """Return a leased group's payload, verified by its checksum. Raises as `leased`."""
        try:
            return self._reader.read_at(group.place.position, str(group.place.writer))
        except DataError as error:
            raise self._unusable(step, group, f"{error.got} at {error.what}", "its payload in the log") from error

    def intact(self, step: int) -> bool:
        """Return whether every payload of a leased step is as it was written."""
        try:
            return all(self.payload(step, group) for group in self.leases[step].groups)
        except DataError:
            return False

    def _decoded(self, step: int, one: records.LeasedGroup) -> tuple[Group, Frames]:
        group, frames = payload.decode(self.payload(step, one), one.order, one.place)
        if tuple(item.key for item in group.items) != one.keys:
            raise self._unusable(step, one, f"other trajectories, {[item.key for item in group.items]}", f"those leased, {one.keys}")
        return group, frames

    def _unusable(self, step: int, one: records.LeasedGroup, got: str, expected: str) -> DataError:
        hint = f"without it, step {step + 1} cannot be trained again"
        return DataError(f"group {one.number} of {self._run_dir}", got=got, expected=expected, hint=hint)


def reader_of(run_dir: Path, section: LogSection) -> Reader:
    """Return the reader of a run's logs. Raises DataError if they are not there, and UserError without the Redis client."""
    if (known := belonging.read(run_dir)) is None:
        hint = "a fork has no batches of its own: fork the run, with the keys of both forks"
        raise DataError(
            "RUN", got=f"{run_dir}, which has no {belonging.MARKER}", expected="a run with a log, which holds its batches", hint=hint
        )
    if section.redis is not None:
        installed.need("redis", "log.redis")
        from asyncmoe.log import redis

        return redis.RedisReader(redis.RedisServer(section.redis, _PATIENCE_S), known.run)
    if not (place := section.place(run_dir)).is_dir():
        hint = "log.folder is on another machine: start there, or copy it here" if section.folder else "it was deleted"
        raise DataError("log", got=f"{place}, which does not exist here", expected="the run's log, which holds its batches", hint=hint)
    return FileReader(place, known.run)


def _within(spans: Sequence[tuple[int, int]], position: int) -> bool:
    """Return whether a position is in one of the ascending ranges."""
    place = bisect_right(spans, position, key=itemgetter(0)) - 1
    return place >= 0 and position < spans[place][1]
