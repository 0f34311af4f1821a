"""Saves checkpoints while training goes on, or while it stands still, depending on `trainer.async_save`.

    training thread                                  thread of the rank
    wait for the previous save; plan, copy           write the file, sync and digest it
    before each step, ask if all ranks have written;
    then rank 0 writes the manifest, renames, and
    deletes older checkpoints

All ranks make the same calls in the same order, so that they agree by collectives of the training thread.
"""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from asyncmoe import checkpoints, storage
from asyncmoe.checkpoints import manifest
from asyncmoe.checkpoints.manifest import Manifest
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, StorageError
from asyncmoe.platform import collectives
from asyncmoe.platform.megatron import state_boxes
from asyncmoe.platform.megatron.writer import Planned, Planner
from asyncmoe.telemetry import heartbeats
from asyncmoe.trainer.model import checkpoint
from asyncmoe.trainer.model.gpt import Model, gather_weights

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

_POLL_S = 0.05


@dataclass(frozen=True)
class Stood:
    """How long training has stood still for checkpoints, in seconds.

    Attributes:
        seconds: the total.
        waited: the part spent waiting for the previous save.
    """

    seconds: float = 0.0
    waited: float = 0.0


class _Report(NamedTuple):
    """A rank's progress: the bytes in its files, and once `ended`, either the facts `checkpoints.finish` needs or the error."""

    nbytes: int
    ended: bool
    sealed: Manifest
    failure: AsyncmoeError | None


class _SaveThread(threading.Thread):
    """Writes a rank's files, syncs and digests them."""

    def __init__(self, config: Config, step: int, rank: int, planned: Planned) -> None:
        super().__init__(name=f"checkpoint of step {step}", daemon=True)
        self.step, self.begun = step, time.monotonic()
        self.planned, self._config, self._rank = planned, config, rank
        self._sealed: Manifest = {}
        self.failure: Exception | None = None
        self._told: AsyncmoeError | None = None

    def run(self) -> None:
        try:
            self.planned.write()
            self._sealed = {path.name: manifest.seal(path) for path in self.planned.paths}
        except Exception as error:  # noqa: BLE001  reported to all ranks, and raised there
            # Explain the error before files are removed: torch may give no reason, so `explain` looks at the disk and states its free
            # space.
            explained = storage.explain(error, *checkpoint.target(self._config, self.step))
            told = f"{self.name}: trainer rank {self._rank}: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
            self._told = explained or AsyncmoeError(told)
            self.failure = error

    def report(self) -> _Report:
        """Return this rank's progress."""
        ended = not self.is_alive()
        nbytes = sum(path.stat().st_size for path in self.planned.paths if path.exists())
        return _Report(nbytes, ended, self._sealed, self._told)


class Saver:
    """Saves one rank's part of a run's checkpoints, at most one at a time. Every rank makes the same calls."""

    def __init__(self, config: Config, model: Model, optimizer: MegatronOptimizer) -> None:
        self._config, self._model, self._optimizer = config, model, optimizer
        self._planner = Planner()
        self._under_way: _SaveThread | None = None
        self._saved: list[tuple[int, float]] = []
        self._stood = Stood()

    def save(self, step: int) -> None:
        """Save the current state as the checkpoint of `step`. Collective over all ranks.

        Raises:
            StorageError: this save, or the previous one, could not be written.
        """
        begin = time.monotonic()
        self.settle()
        waited = time.monotonic() - begin
        gather_weights(self._model)
        with storage.writing(*checkpoint.target(self._config, step)):
            self._under_way = _SaveThread(self._config, step, self._model.mesh.rank, self._plan(step))
        self._under_way.start()
        if not self._config.trainer.async_save:
            self.settle()
        self._stood = Stood(self._stood.seconds + time.monotonic() - begin, self._stood.waited + waited)

    def saved(self) -> list[tuple[int, float]]:
        """Return (step, seconds) of the checkpoints that have become complete since the last call. Call it before each step, on all ranks.

        Raises:
            StorageError: a rank could not write its part; every rank raises the same.
            AsyncmoeError: a save failed for another reason.
        """
        if self._under_way is not None:
            self._look(self._under_way)
        found, self._saved = self._saved, []
        return found

    def stood(self) -> Stood:
        """Return how long training has stood still since the last call."""
        found, self._stood = self._stood, Stood()
        return found

    def settle(self) -> None:
        """Wait for the save in progress, if any; `saved` returns it. Collective over all ranks.

        Raises:
            StorageError, AsyncmoeError: as `saved`; or no rank has written anything for `trainer.timeout_s`.
        """
        limit, seen, since = self._config.trainer.timeout_s, [-1], time.monotonic()
        while (thread := self._under_way) is not None:
            thread.join(_POLL_S)
            if (moved := self._look(thread)) != seen:
                seen, since = moved, time.monotonic()
                heartbeats.beat(f"waiting for the checkpoint of step {thread.step}")
            elif time.monotonic() - since >= limit:
                raise AsyncmoeError(f"checkpoint of step {thread.step}: nothing was written for {limit:g} s; does its disk hang?")

    def _plan(self, step: int) -> Planned:
        config, model = self._config, self._model
        if model.mesh.rank == 0:
            checkpoints.start(config.run.dir, step)
        collectives.barrier()
        with state_boxes.as_boxes() if checkpoint.distributed(model) else nullcontext():
            state = checkpoint.sharded_state(model, self._optimizer, loading=False)
            return self._planner.plan(state, checkpoints.temporary(config.run.dir, step), copy=config.trainer.async_save)

    def _look(self, thread: _SaveThread) -> list[int]:
        """Once all ranks' threads have ended, publish their files as the checkpoint, or remove them. Return each rank's written bytes."""
        reports = collectives.everyones(thread.report())
        if all(one.ended for one in reports):
            self._under_way = None
            self._check(thread, reports)
            with storage.writing(*checkpoint.target(self._config, thread.step)):
                thread.planned.finish()
            self._publish(thread.step, {name: sealed for one in reports for name, sealed in one.sealed.items()})
            self._saved.append((thread.step, time.monotonic() - thread.begun))
        return [one.nbytes for one in reports]

    def _check(self, thread: _SaveThread, reports: list[_Report]) -> None:
        """Raise the error that ended a save: a storage failure first, because it may cause the others; then the lowest rank's."""
        failures = sorted((one.failure for one in reports if one.failure), key=lambda failure: not isinstance(failure, StorageError))
        if failures:
            if self._model.mesh.rank == 0:
                checkpoints.give_up(self._config.run.dir)
            raise failures[0] from thread.failure

    def _publish(self, step: int, sealed: Manifest) -> None:
        config = self._config
        failure: StorageError | None = None
        if self._model.mesh.rank == 0:
            facts = checkpoint.facts_now(config, step, self._model)
            try:
                with storage.writing(*checkpoint.target(config, step)):
                    checkpoints.finish(config.run.dir, step, facts, checkpoints.Retention.of(config), sealed)
            except StorageError as error:
                failure = error
                checkpoints.give_up(config.run.dir)
        if told := collectives.everyones(failure)[0]:
            raise told
