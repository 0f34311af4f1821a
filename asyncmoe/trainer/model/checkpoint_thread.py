"""The thread of a rank that writes a copy of its state to disk while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncmoe import checkpoints
from asyncmoe.checkpoints.manifest import Sealed
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, StorageError
from asyncmoe.platform.megatron.snapshot import Planned
from asyncmoe.reshard import device_threads
from asyncmoe.trainer.model import checkpoint_files
from asyncmoe.trainer.model.checkpoint_board import Board
from asyncmoe.trainer.model.checkpoint_progress import SaveOutcome, Written, failure_of, state_of


@dataclass(frozen=True)
class SaveTask:
    """A save of one rank, after its copy has begun.

    Attributes:
        copies: of the plan's shards, in order; complete when `copied` has returned.
        common: what all ranks have in common, as of the step; used on rank 0.
        facts: what `checkpoints.finish` stores; used on rank 0.
    """

    config: Config
    step: int
    rank: int
    world: int
    planned: Planned
    copies: Sequence[torch.Tensor]
    copied: Callable[[], None]
    common: Mapping[str, Any]
    facts: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """The directory that becomes the checkpoint."""
        return checkpoints.temporary(self.config.run.dir, self.step)


class SaveThread:
    """Writes, reports, and learns how the save has ended. On rank 0 it also makes the checkpoint of all ranks' files.

    Args:
        device: of the rank ("cuda:1").
    """

    def __init__(self, task: SaveTask, board: Board, device: str) -> None:
        self._task, self._board = task, board
        self._failure: BaseException | None = None
        self._moved = 0
        self._thread: threading.Thread = device_threads.start(device, f"checkpoint of step {task.step}", self._run, self._failed)

    @property
    def moved(self) -> int:
        """A number that grows while this rank writes, or the ranks that it waits for do."""
        return self._moved + self._board.progress

    def done(self) -> bool:
        """Return whether the save has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """Wait for the end at most so long; return `done`."""
        self._thread.join(seconds)
        return self.done()

    def check(self) -> None:
        """Raise what ended the save, if it has failed."""
        if self.done() and self._failure is not None:
            raise self._failure

    def _failed(self, error: Exception) -> None:
        self._failure = error

    def _run(self) -> None:
        mine, cause = self._written()
        self._board.report(mine)
        verdict = self._finished(mine) if self._task.rank == 0 else self._told(mine)
        if not verdict.failure:
            return
        if verdict.storage:
            raise StorageError(verdict.failure) from cause
        whose = f"trainer rank {verdict.rank}: " if verdict.rank != self._task.rank else ""
        raise AsyncmoeError(f"checkpoint of step {self._task.step}: {whose}{verdict.failure}") from cause

    def _told(self, mine: Written) -> SaveOutcome:
        """Return how rank 0 has ended the save; this rank's own failure if rank 0 says nothing. On the other ranks."""
        try:
            return self._board.verdict()
        except AsyncmoeError:
            if not mine.failure:
                raise
            return SaveOutcome(mine.failure, mine.storage, self._task.rank)

    def _written(self) -> tuple[Written, Exception | None]:
        task = self._task
        try:
            task.copied()
            if task.rank != 0:
                self._board.wait_for_begin()
            return checkpoint_files.write_shards(task.folder, task.rank, task.planned, task.copies, self._moves), None
        except Exception as error:  # noqa: BLE001  reported to all ranks, and raised there
            return self._report_of(error), error

    def _moves(self) -> None:
        self._moved += 1
        self._board.moved()

    def _report_of(self, error: Exception) -> Written:
        """Say why a file could not be written. Before anything is removed, because the free space is part of it."""
        explained = checkpoint_files.explain(self._task.config, self._task.step, error)
        if explained is not None:
            return Written(failure=str(explained), storage=True)
        return Written(failure=f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")

    def _finished(self, mine: Written) -> SaveOutcome:
        """Make the checkpoint of all ranks' files, or remove them; tell all ranks. On rank 0."""
        task = self._task
        cause: Exception | None = None
        try:
            reports = self._board.reports() if not mine.failure else {0: mine}
            if state_of(reports, task.world) == "whole":
                self._publish(reports)
        except Exception as error:  # noqa: BLE001  told to all ranks, and raised there
            cause, reports = error, {0: self._report_of(error)}
        verdict = failure_of(reports)
        if verdict.failure:
            checkpoints.give_up(task.config.run.dir)
        self._board.decide(verdict)
        if cause is not None and not verdict.storage:
            raise cause
        return verdict

    def _publish(self, reports: Mapping[int, Written]) -> None:
        task, section = self._task, self._task.config.trainer
        checkpoint_files.write_common(task.folder, task.planned, task.common, [reports[rank] for rank in sorted(reports)])
        sealed = {report.file: Sealed(report.nbytes, report.crc32c) for report in reports.values()}
        checkpoints.finish(task.config.run.dir, task.step, task.facts, section.keep_checkpoints, section.keep_every, sealed)
