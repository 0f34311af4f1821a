"""The controller's use of the journal: which run it belongs to, what a queue goes on with, and what a checkpoint makes superfluous."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncmoe import checkpoints, installed
from asyncmoe.config import Config, gone
from asyncmoe.errors import AsyncmoeError, ProtocolError
from asyncmoe.journal import belonging
from asyncmoe.journal.belonging import Belonging
from asyncmoe.journal.journal import Journal
from asyncmoe.journal.recovery import Recovered, recover
from asyncmoe.journal.unjournaled import Unjournaled
from asyncmoe.models import origin
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.replays import UNDISTURBED, Resumption
from asyncmoe.rpc.worker_messages import WorkerBegin
from asyncmoe.trajectory import Recording

log = logging.getLogger(__name__)


class Journaling:
    """Connects one controller with the journal of its run; with journal.enabled=false there is none.

    Attributes:
        journal: for the queue and the producer.
        first_group: number of the first group never begun; known after `resume`.
        settled, retain: the rollout workers' (`asyncmoe.rollout.workers.fleet`), called before the rows are read, and after.
    """

    def __init__(self, config: Config, journal: Journal | None) -> None:
        self._config, self._held = config, journal
        self.journal = journal or Unjournaled()
        self.first_group = 0
        self.settled: Callable[[], Any] = dict
        self.retain: Callable[[Mapping[int, frozenset[int]], Any], None] = lambda live, settled: None

    @classmethod
    def open(cls, config: Config, hf: Mapping[str, Any], recording: Recording) -> Journaling:
        """Open the journal of a run, if it has one. Blocks.

        Args:
            hf: configuration of the model.
            recording: what engines report of each token.

        Raises:
            UserError: it is another run's, damaged, in use, or does not belong to the newest checkpoint.
            StorageError: it cannot be written.
        """
        section = config.journal
        if not section.enabled:
            belonging.refuse_without(config.run.dir, section.place(config.run.dir))
            return cls(config, None)
        ours = belonging_of(config, hf, recording)
        if section.redis is not None:
            installed.need("redis", "journal.redis")
            from asyncmoe.journal.in_redis import opening

            held = opening.open_journal(section, ours)
        else:
            bounds = {"segment_bytes": section.segment_bytes, "max_bytes": section.max_bytes}
            turns = section.turns and not config.rollout.workers  # which record those of their own
            held = Journal.open(section.place(config.run.dir), ours, **bounds, turns=turns)
        try:
            newest = checkpoints.newest(config.run.dir)
            step = 0 if newest is None else int(checkpoints.facts(newest)["step"])
            recover(held.recorded, step, config.warmup.steps, config.rollout.batch, held.name)
        except BaseException:
            held.close()
            raise
        return cls(config, held)

    async def for_workers(self) -> WorkerBegin:
        """Return what a rollout worker must know of the journal that joins now."""
        return WorkerBegin() if self._held is None else WorkerBegin(self._held.identity, await self._held.under_way())

    @property
    def is_new(self) -> bool:
        """Whether no queue has used the journal before; also without a journal."""
        return self._held is None or self._held.recorded.first is None

    async def resume(self, step: int) -> Resumption:
        """Return what the queue of a trainer that has taken `step` steps goes on with.

        Raises:
            DataError: the journal does not belong to this checkpoint, or is damaged.
        """
        config, journal = self._config, self._held
        self.first_group = max(0, step - config.warmup.steps) * config.rollout.groups_per_step
        if journal is None:
            return UNDISTURBED
        found = journal.begin(step, config.warmup.steps, config.rollout.batch, self.first_group)
        self.first_group = found.next
        queued = await journal.groups([group.number for group in found.queued])
        if found.replays or queued or found.starts:
            log.info("journal: %s", told(found))
        return Resumption(found.accounts, queued, found.starts, found.arrivals, journal, served=max(found.replays, default=-1) + 1)

    def check_reopen(self, step: int, queue: BoundedQueue) -> None:
        """Refuse a trainer that was started again in place and has taken `step` steps, if it cannot be given the steps since then.

        Raises:
            AsyncmoeError: there is no journal.
            ProtocolError: it is ahead of the queue.
        """
        if self._held is None:
            raise AsyncmoeError("a trainer was started again in place, which needs the journal, and journal.enabled is false")
        if step > queue.trained_steps:
            raise ProtocolError(f"hello: the trainer has taken {step} steps, the controller counts {queue.trained_steps}; restart both")

    async def reopen(self, queue: BoundedQueue, step: int) -> int:
        """Have a queue that goes on answer a trainer that was started again in place and has taken `step` steps; return the lineage.

        Nothing may be leased or committed meanwhile.

        Raises:
            DataError: the journal does not belong to this checkpoint.
        """
        config, journal = self._config, self._held
        assert journal is not None  # `check_reopen`
        found = await journal.now(step, config.warmup.steps)
        queue.reopen(found)
        steps = f"steps {min(found.replays)} to {max(found.replays)} are trained again" if found.replays else "no step is trained again"
        log.info("journal: lineage %d, %s", found.lineage, steps)
        return found.lineage

    async def saved(self) -> None:
        """Delete what no checkpoint needs that the run may go back to.

        Raises:
            StorageError: a file could not be deleted.
        """
        if self._held is None or (floor := oldest(self._config.run.dir, self._config.trainer.keep_checkpoints)) is None:
            return
        settled = self.settled()
        freed = await self._held.forget(floor, self._config.rollout.workers)
        self.retain(self._held.needed, settled)
        log.info("journal: %d bytes freed, %d kept", freed, self._held.size)

    async def close(self) -> None:
        """Write what was handed over, and close the journal."""
        if self._held is not None:
            await asyncio.to_thread(self._held.close)


def belonging_of(config: Config, hf: Mapping[str, Any], recording: Recording) -> Belonging:
    """Return which run a journal is of, and refuse a configuration that it does not belong to. Raises as `Belonging.check`."""
    section = config.journal
    found = Belonging.of_run(config.run.dir, identity(config, hf, recording), redis=section.redis is not None)
    if found.told and origin.read(config.run.dir):  # with which the launcher has compared the task, which may change by choice
        found.of = {**found.of, "task": found.told["of"]["task"]}
    if found.told and (was := found.told["of"]["model"]).rpartition(" ")[2] == found.of["model"].rpartition(" ")[2]:
        found.of = {**found.of, "model": was}  # its directory may have another name
    found.check("journal.folder" if section.redis is None else "run.dir", section.place(config.run.dir))
    return found


def identity(config: Config, hf: Mapping[str, Any], recording: Recording) -> dict[str, str]:
    """Return what a journal belongs to besides its run, by the key that names it: all that must be the same for its groups to be trained.

    Of paths only the last part is in them, so that a run and its files may move; of the model's, see `belonging_of`.
    """
    return {
        "run.seed": str(config.run.seed),
        "model": f"{config.model.path.name} {_digest(hf)}",
        "task": f"{config.task.kind} {_digest({**config.task.model_dump(), **gone.TASK})}",
        "rollout.groups_per_step": str(config.rollout.groups_per_step),
        "rollout.group_size": str(config.rollout.group_size),
        "warmup.steps": str(config.warmup.steps),
        "keep": _digest(repr(recording)),
    }


def oldest(run_dir: Path, keep: int) -> int | None:
    """Return the step of the oldest of the `keep` newest checkpoints, which the run may go back to; None if there is none."""
    complete = checkpoints.directory(run_dir, 0).parent.glob("step-*")
    steps = sorted(int(path.name.removeprefix("step-")) for path in complete if path.name.removeprefix("step-").isdecimal())
    return min(steps[-keep:], default=None)


def told(found: Recovered) -> str:
    """Describe what a run goes on with."""
    steps = f", steps {min(found.replays)} to {max(found.replays)} are trained again" if found.replays else ""
    return (
        f"lineage {found.lineage}{steps}, {len(found.queued)} groups are queued, {len(found.starts)} start again, "
        f"then group {found.next} and the next ones"
    )


def _digest(values: object) -> str:
    text = json.dumps(values, sort_keys=True, default=lambda value: value.name if isinstance(value, Path) else str(value))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
