"""The batches that a run trained on, read from its log: also while the run is alive, and after it was moved or copied.

Here a step's number is that of its lease. For users, and in `records.TrainedStep`, the step is one higher: the steps taken, it included.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from operator import itemgetter
from pathlib import Path

from asyncmoe import installed
from asyncmoe.checkpoints import directories
from asyncmoe.config.log import LogSection
from asyncmoe.errors import DataError
from asyncmoe.flight import records as trained
from asyncmoe.log import belonging
from asyncmoe.log.files import FileReader
from asyncmoe.log.log import Place, Reader
from asyncmoe.queue import payload, records
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
        entries = (records.entry(data).change for _, _, data in self._reader.found(CONTROLLER) if data is not None)
        self.leases, self.ended = leases_in(entries)
        self._held = dict[Place, tuple[Group, Frames]]()
        self._step: int | None = None

    @property
    def kept(self) -> list[range]:
        """The steps that the log still has completely, as far as its size and positions show; no payload is read."""
        writers = {one.place.writer for lease in self.leases.values() for one in lease.groups}
        spans = {writer: self._reader.spans(str(writer)) for writer in writers}
        whole = [n for n, lease in self.leases.items() if all(_within(spans[one.place.writer], one.place.position) for one in lease.groups)]
        return ranges(whole)

    def leased(self, step: int) -> Leased:
        """Return a step's batch as `asyncmoe.queue.bounded.BoundedQueue.lease` returns one that is leased again.

        Raises:
            DataError: the log does not have the step, or a payload is damaged, gone, or another group's.
            StorageError: its Redis server does not answer.
        """
        if (lease := self.leases.get(step)) is None:
            known = [*self.leases]
            got = "a step that is no longer kept" if known and step < known[0] else "a step whose batch was never leased"
            raise DataError(f"step {step + 1} of {self._run_dir}", got=got, expected=f"one of the kept steps: {told(self.kept, 1)}")
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
        raise DataError("RUN", got=f"{run_dir}, which has no {belonging.MARKER}", expected="a run with a log, which holds its batches")
    if section.redis is not None:
        installed.need("redis", "log.redis")
        from asyncmoe.log import redis

        return redis.RedisReader(redis.RedisServer(section.redis, _PATIENCE_S), known.run)
    if not (place := section.place(run_dir)).is_dir():
        hint = "log.folder is on another machine: start there, or copy it here" if section.folder else "it was deleted"
        raise DataError("log", got=f"{place}, which does not exist here", expected="the run's log, which holds its batches", hint=hint)
    return FileReader(place, known.run)


def leases_in(changes: Iterable[records.Change]) -> tuple[dict[int, records.StepLeased], dict[int, str]]:
    """Return the newest lease of each step in ascending order, and how each step ended (see `Batches`). Pure."""
    leases, ended = dict[int, records.StepLeased](), dict[int, str]()
    for change in changes:
        match change:
            case records.StepLeased(step):
                leases[step] = change
                ended.pop(step, None)
            case records.StepCommitted(step, skipped):
                ended[step] = skipped
            case records.StepReleased(step):
                leases.pop(step, None)
                ended.pop(step, None)
            case records.RunStands(again=int(again)):
                ended = {step: why for step, why in ended.items() if step < again}
    return dict(sorted(leases.items())), ended


def replayable(run_dir: Path, kept: Iterable[range], recorded: Collection[int]) -> list[range]:
    """Return the steps, counted as by users, that can be trained again. Each range begins with the step after a checkpoint of the run, or
    with step 1, before which a run without a warm-up has the model's files.

    Args:
        kept: `Batches.kept`.
        recorded: steps that have a record (`asyncmoe.flight.records`).
    """
    firsts = {1, *((directories.step_of(path.name) or 0) + 1 for path in directories.complete(run_dir))}
    spans = ranges(step + 1 for span in kept for step in span if step + 1 in recorded)
    return [range(min(firsts & {*span}), span.stop) for span in spans if firsts & {*span}]


def described(run_dir: Path, section: LogSection) -> str:
    """Return a line that says which steps of a run can be trained again, and from which checkpoint. Raises as `Batches`."""
    recorded = trained.read(run_dir).steps if (run_dir / trained.TRAINED).is_file() else ()
    lines = []
    for span in replayable(run_dir, Batches(run_dir, section).kept, recorded):
        start = f"checkpoint {directories.name_of(span[0] - 1)}" if span[0] > 1 else "the model's files"
        lines.append(f"{told([span])} can be replayed, from {start}")
    return f"steps {'; steps '.join(lines)}" if lines else "no step can be replayed"


def ranges(numbers: Iterable[int]) -> list[range]:
    """Return ascending numbers as ranges of consecutive ones."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def told(spans: Iterable[range], more: int = 0) -> str:
    """Format ranges for people, with `more` added to each number."""
    return ", ".join(f"{one[0] + more} to {one[-1] + more}" if len(one) > 1 else f"{one[0] + more}" for one in spans) or "none"


def _within(spans: Sequence[tuple[int, int]], position: int) -> bool:
    """Return whether a position is in one of the ascending ranges."""
    place = bisect_right(spans, position, key=itemgetter(0)) - 1
    return place >= 0 and position < spans[place][1]
