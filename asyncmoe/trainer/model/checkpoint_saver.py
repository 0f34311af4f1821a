"""Saves checkpoints while training goes on, or while it stands still, as `trainer.async_save` says.

    training thread                          thread of the rank
    wait for the save before; copy, begin    wait for the copy; write the file, sync and digest it; report
    go on; before an update, wait for a      rank 0: when all have reported, write the manifest, rename,
    copy that a GPU still makes              delete older checkpoints; tell all ranks
    before the next step: raise what failed

All ranks make the same calls in the same order. They agree in the store through which they met (`checkpoint_board`), never by a collective
beside those of training.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from asyncmoe import checkpoints, storage
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError
from asyncmoe.platform import collectives
from asyncmoe.platform.megatron import snapshot
from asyncmoe.platform.megatron.snapshot import Planned
from asyncmoe.telemetry import heartbeats
from asyncmoe.trainer.model import checkpoint
from asyncmoe.trainer.model.checkpoint_board import Board
from asyncmoe.trainer.model.checkpoint_buffers import Buffers
from asyncmoe.trainer.model.checkpoint_progress import Patience
from asyncmoe.trainer.model.checkpoint_thread import SaveTask, SaveThread
from asyncmoe.trainer.model.gpt import Model, gather_weights

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

_NUMBERS = itertools.count(1)
"""Of the asynchronous saves of this process group, the same on every rank."""
_JOIN_S = 0.25


@dataclass(frozen=True)
class Stood:
    """How long training has stood still for checkpoints, in seconds.

    Attributes:
        seconds: in all.
        waited: of these, for the save before to end.
    """

    seconds: float = 0.0
    waited: float = 0.0


@dataclass(frozen=True)
class _UnderWay:
    step: int
    thread: SaveThread
    begun: float


class Saver:
    """Saves one rank's part of a run's checkpoints; at most one save is under way. Every rank makes the same calls."""

    def __init__(self, config: Config, model: Model, optimizer: MegatronOptimizer) -> None:
        self._config, self._model, self._optimizer = config, model, optimizer
        self._planned: Planned | None = None
        self._buffers: Buffers | None = None
        self._under_way: _UnderWay | None = None
        self._saved: list[tuple[int, float]] = []
        self._stood = Stood()

    @property
    def buffer_bytes(self) -> int:
        """Host memory of this rank's second copy; 0 before the first asynchronous save."""
        return 0 if self._buffers is None else self._buffers.nbytes

    def save(self, step: int) -> None:
        """Save the state as it is now as the checkpoint of `step`. Collective over all ranks.

        Raises:
            StorageError: this save, or the one before, could not be written.
        """
        begin = time.monotonic()
        waited = 0.0
        if not self._config.trainer.async_save:
            checkpoint.save(self._config, step, self._model, self._optimizer)
            self._saved.append((step, time.monotonic() - begin))
        else:
            if self._under_way is not None:
                self.settle()
                waited = time.monotonic() - begin
            self._begin(step)
        self._stood = Stood(self._stood.seconds + time.monotonic() - begin, self._stood.waited + waited)

    def before_update(self) -> None:
        """Have the device copy what is saved before it changes. Call it before parameters change."""
        if self._buffers is not None:
            self._buffers.wait_on_device()

    def saved(self) -> list[tuple[int, float]]:
        """Return (step, seconds) of the checkpoints that have become complete since the last call, and raise what failed. Call it before
        each step.

        Raises:
            StorageError: a rank could not write its part; every rank raises the same.
            AsyncmoeError: a save failed for another reason.
        """
        if self._under_way is not None and self._under_way.thread.done():
            under_way, self._under_way = self._under_way, None
            under_way.thread.check()
            self._saved.append((under_way.step, time.monotonic() - under_way.begun))
        found, self._saved = self._saved, []
        return found

    def stood(self) -> Stood:
        """Return how long training has stood still since the last call."""
        found, self._stood = self._stood, Stood()
        return found

    def settle(self) -> None:
        """Wait for the save that is under way, if one is; `saved` returns it.

        Raises:
            StorageError, AsyncmoeError: as `saved`; or the thread has done nothing for `trainer.timeout_s`.
        """
        if self._under_way is None:
            return
        limit, thread = self._config.trainer.timeout_s, self._under_way.thread
        patience = Patience(limit, time.monotonic())
        seen = -1
        while not thread.wait(_JOIN_S):
            if thread.moved != seen:
                seen = thread.moved
                heartbeats.beat(f"waiting for the checkpoint of step {self._under_way.step}")
            if patience.over(thread.moved, time.monotonic()):
                raise AsyncmoeError(f"checkpoint of step {self._under_way.step}: nothing was written for {limit:g} s; does its disk hang?")
        self._saved = self.saved()

    def _begin(self, step: int) -> None:
        """Copy, and start the thread that writes the copy."""
        config, model, first = self._config, self._model, self._model.mesh.rank == 0
        gather_weights(model)
        planned, buffers = self._plan()
        board = Board(next(_NUMBERS), model.mesh.rank, model.mesh.world, config.trainer.timeout_s)
        if first:
            with storage.writing(f"checkpoint of step {step}", checkpoints.temporary(config.run.dir, step)):
                checkpoints.start(config.run.dir, step)
            board.begin()
        buffers.copy()
        common = snapshot.refreshed(planned.common, self._optimizer) if first else {}
        facts = checkpoint.facts_now(config, step, model) if first else {}
        task = SaveTask(config, step, model.mesh.rank, model.mesh.world, planned, buffers.copies, buffers.wait, common, facts)
        self._under_way = _UnderWay(step, SaveThread(task, board, str(model.mesh.device)), time.monotonic())

    def _plan(self) -> tuple[Planned, Buffers]:
        """Return the plan and its memory, made anew if anything has moved on any rank: planning is collective."""
        chunks = [checkpoint.trained(chunk) for chunk in self._model.chunks]
        kept = self._planned is not None and snapshot.holds(self._planned, chunks, self._optimizer)
        if self._planned is None or self._buffers is None or not all(collectives.everyones(kept)):
            if self._buffers is not None:
                self._buffers.close()

            def make() -> dict[str, object]:
                return checkpoint.sharded_state(self._model, self._optimizer, loading=False)

            self._planned = snapshot.plan(make, chunks, self._optimizer, collectives.gathered)
            self._buffers = Buffers(self._planned.shards, torch.device(self._model.mesh.device))
        return self._planned, self._buffers
