"""Write records to TensorBoard event files, without torch: importing it takes seconds, and the supervisor has no other use for it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from asyncmoe.errors import StorageError
from asyncmoe.storage import writing
from asyncmoe.telemetry.clock import unix
from asyncmoe.telemetry.follow import Followed
from asyncmoe.telemetry.metric import Number, numbers
from asyncmoe.telemetry.records import sessions
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout
from asyncmoe.telemetry.schema import Resume, Step

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoard:
    """Writes each number of a step as `<phase>/<field>[/<key>]` and of a rollout record as `rollout/...`, both at the trainer's step,
    and of an evaluation as `evaluation/[<set>/]...`, at the evaluated version.

    If steps are repeated after a resume, it marks the superseded events as purged, so that TensorBoard drops them.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: EventFileWriter | None = None
        self._step = 0
        self._closed = False
        self._evaluations: list[Evaluation] = []

    def feed(self, records: list[Followed]) -> None:
        """Write new records.

        Raises:
            StorageError: the write failed; all further records are ignored.
        """
        try:
            with writing("TensorBoard's files", self._directory):
                self._feed(records)
        except StorageError:
            self._closed, self._writer = True, None
            raise

    def _feed(self, records: list[Followed]) -> None:
        if self._closed:
            return
        for session in sessions(record for record in records if isinstance(record, Step | Resume)):
            for step in session:
                self._write(step)
        for record in records:
            if isinstance(record, Rollout):
                self._write_rollout(record)
            elif isinstance(record, Evaluation):
                self._evaluations.append(record)
        self._write_evaluations()
        if records and self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            with writing("TensorBoard's files", self._directory):
                self._writer.close()

    def _write(self, record: Step) -> None:
        writer = self._writer_from(record.step)
        self._step = record.step
        for number in numbers(record):
            _add(writer, _tag(record.phase, number), number, record.step, record.time)

    def _write_rollout(self, record: Rollout) -> None:
        # The current step is unknown before the first step of this start.
        if self._writer is None:
            return
        for number in numbers(record):
            _add(self._writer, _tag("rollout", number), number, self._step, record.time)

    def _write_evaluations(self) -> None:
        # An evaluation may arrive before the first step of this start; it is kept until then.
        if self._writer is None:
            return
        for record in self._evaluations:
            for number in numbers(record):
                group = f"evaluation/{record.name}" if record.name else "evaluation"
                _add(self._writer, _tag(group, number), number, record.version, record.time)
        self._evaluations.clear()

    def _writer_from(self, step: int) -> EventFileWriter:
        if self._writer is not None and step > self._step:
            return self._writer
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is not None:
            self._writer.close()
        threading.excepthook = _told_by_the_next_call
        self._writer = EventFileWriter(str(self._directory))
        # What earlier files have of this step and later ones is purged (`EventAccumulator.purge_orphaned_data`).
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(step=step, wall_time=unix(), session_log=start))
        return self._writer


_others = threading.excepthook


def _told_by_the_next_call(args: threading.ExceptHookArgs) -> None:
    """Suppress the traceback of the event writer's thread: the writer's next caller receives the same error, e.g. for a full disk."""
    if not (type(args.thread).__name__ == "_AsyncWriterThread" and isinstance(args.exc_value, OSError)):
        _others(args)


def _add(writer: EventFileWriter, tag: str, number: Number, step: int, at: float) -> None:
    """Write a scalar, as of `at`, Unix seconds."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    writer.add_event(Event(step=step, wall_time=at, summary=Summary(value=[Summary.Value(tag=tag, simple_value=number.value)])))


def _tag(group: str, number: Number) -> str:
    return f"{group}/{number.name}" if number.key is None else f"{group}/{number.name}/{number.key}"
