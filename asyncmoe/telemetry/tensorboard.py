"""Write records to TensorBoard event files."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from asyncmoe.errors import StorageError
from asyncmoe.storage import writing
from asyncmoe.telemetry.follow import Followed
from asyncmoe.telemetry.metric import Number, numbers
from asyncmoe.telemetry.records import sessions
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout
from asyncmoe.telemetry.schema import Resume, Step

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Writes each number of a step as `<phase>/<field>[/<key>]` and of a rollout record as `rollout/...`, both at the trainer's step,
    and of an evaluation as `evaluation/[<set>/]...`, at the evaluated version.

    If steps are repeated after a resume, it marks the superseded events as purged, so that TensorBoard drops them.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: SummaryWriter | None = None
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
            writer.add_scalar(_tag(record.phase, number), number.value, record.step, walltime=record.time)

    def _write_rollout(self, record: Rollout) -> None:
        # The current step is unknown before the first step of this start.
        if self._writer is None:
            return
        for number in numbers(record):
            self._writer.add_scalar(_tag("rollout", number), number.value, self._step, walltime=record.time)

    def _write_evaluations(self) -> None:
        # An evaluation may arrive before the first step of this start; it is kept until then.
        if self._writer is None:
            return
        for record in self._evaluations:
            for number in numbers(record):
                group = f"evaluation/{record.name}" if record.name else "evaluation"
                self._writer.add_scalar(_tag(group, number), number.value, record.version, walltime=record.time)
        self._evaluations.clear()

    def _writer_from(self, step: int) -> SummaryWriter:
        if self._writer is not None and step > self._step:
            return self._writer
        from torch.utils.tensorboard import SummaryWriter  # importing torch takes seconds, and most readers do not need it

        if self._writer is not None:
            self._writer.close()
        threading.excepthook = _told_by_the_next_call
        self._writer = SummaryWriter(str(self._directory), purge_step=step)
        return self._writer


_others = threading.excepthook


def _told_by_the_next_call(args: threading.ExceptHookArgs) -> None:
    """Suppress the traceback of the event writer's thread: the writer's next caller receives the same error, e.g. for a full disk."""
    if not (type(args.thread).__name__ == "_AsyncWriterThread" and isinstance(args.exc_value, OSError)):
        _others(args)


def _tag(group: str, number: Number) -> str:
    return f"{group}/{number.name}" if number.key is None else f"{group}/{number.name}/{number.key}"
