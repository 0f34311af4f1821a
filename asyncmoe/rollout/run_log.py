"""The controller's use of the log: check its run, resume the queue from it, and delete what checkpoints make superfluous."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from asyncmoe import checkpoints, installed, storage
from asyncmoe.checkpoints import Retention, directories
from asyncmoe.config import Config
from asyncmoe.config.log import LogSection
from asyncmoe.errors import DataError
from asyncmoe.log import belonging, files, turns
from asyncmoe.log.belonging import Belonging
from asyncmoe.log.files import FileLog
from asyncmoe.log.log import Log
from asyncmoe.log.room import Room
from asyncmoe.log.turns import Turns
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.fold import LogState, Recovered, recover
from asyncmoe.queue.group_buffer import Group
from asyncmoe.queue.queue_log import CONTROLLER, OWN, QueueLog
from asyncmoe.rpc.worker_messages import WorkerBegin
from asyncmoe.trajectory import Recording

log = logging.getLogger(__name__)
Open = Callable[[str, int | None], Log]
"""(writer, bound on its bytes) -> its log, opened."""
Measure = Callable[[Sequence[str]], Room]
"""Writers of payloads -> the room of their logs."""


@dataclass(frozen=True)
class WorkerLog:
    """The logs of a worker: payloads of whole groups, and the engines' answers to episodes in progress."""

    payloads: Log
    turns: Turns

    @classmethod
    def open(cls, section: LogSection, run_dir: Path, run: str, number: int, under_way: Mapping[int, int]) -> WorkerLog:
        """Open the logs of worker `number` of a run, and find the answers of groups in progress. Blocks. Raises as `FileLog`."""
        opened, _ = backend(section, run_dir, run)
        with ExitStack() as held:
            payloads = opened(str(number), section.max_bytes)
            held.callback(payloads.close)
            made = cls(payloads, Turns(opened(turns.writer(number), section.max_bytes // turns.SHARE), under_way))
            held.pop_all()
        return made

    def close(self) -> None:
        """Make all records durable, and close both logs. Blocks."""
        self.turns.close()
        self.payloads.close()


class RunLog:
    """Connects one controller with the log of its run.

    Attributes:
        queue_log: for the queue.
        room: returns the room of the logs; blocks.
    """

    def __init__(self, config: Config, queue_log: QueueLog, run: str) -> None:
        self._config, self.queue_log, self._run = config, queue_log, run
        self._kept, self._told = Retention.of(config), False
        _, measure = backend(config.log, config.run.dir, run)
        self.room = partial(measure, [str(number + OWN) for number in range(config.rollout.workers)])

    @classmethod
    def open(cls, config: Config, recording: Recording) -> RunLog:
        """Open the log of a run. Blocks.

        Args:
            recording: what engines report of each token.

        Raises:
            UserError: it is another run's, damaged, in use, or does not belong to the newest checkpoint.
            StorageError: it cannot be written.
        """
        run_dir, section = config.run.dir, config.log
        known, now = belonging.read(run_dir), belonging_of(config, recording)
        if now != known:  # written first, so that no log is left without its run's record
            belonging.write(run_dir, now)
        opened, _ = backend(section, run_dir, now.run)
        with ExitStack() as held:
            kept = QueueLog(opened(CONTROLLER, None), lambda: belonging.write(run_dir, msgspec.structs.replace(now, begun=True)))
            held.callback(kept.close)
            newest = checkpoints.newest(run_dir)
            step = 0 if newest is None else int(checkpoints.facts(newest)["step"])
            if known is not None and known.begun and not kept.state.next:
                log.warning("%s is gone: what was queued or under way when the run stopped is sampled again", kept.name)
            if known is not None and not known.begun and known.of != now.of:
                kept.state = LogState()  # the records belong to a run that never began
            recover(kept.state, step, config.warmup.steps, config.rollout.batch, kept.name)
            held.pop_all()
        return cls(config, kept, now.run)

    def for_workers(self) -> WorkerBegin:
        """Return what a rollout worker that joins now must know of the log."""
        return WorkerBegin(self._run, self.queue_log.state.under_way)

    async def resume(self, step: int, same: bool = False) -> tuple[Recovered, Sequence[Group]]:
        """Return the state from which the queue resumes for a trainer that has taken `step` steps, and its queued groups. `same`: as in
        `recover`.

        Raises:
            DataError: the log does not belong to this checkpoint, or is damaged.
        """
        config, queue_log = self._config, self.queue_log
        first = max(0, step - config.warmup.steps) * config.rollout.groups_per_step
        base, batch = config.warmup.steps, config.rollout.batch
        lost = await asyncio.to_thread(queue_log.lost, max(step, base))
        found = queue_log.begin(step, base, batch, first, lost, same=same)
        queued = await queue_log.groups(found.queued)
        said = "log: history %d, %d steps are trained again, %d groups are queued, %d start again, then group %d and the next ones"
        log.info(said, found.history, len(found.replays), len(queued), len(found.starts), queue_log.state.next)
        return found, queued

    def reopen(self, queue: BoundedQueue, step: int, same: bool) -> int:
        """Set a running queue back for a trainer restarted in place at `step` steps; return the history. `same`: as in `recover`.

        Raises:
            DataError: the log does not belong to this checkpoint.
        """
        found = self.queue_log.reopening(step, self._config.warmup.steps, self._config.rollout.batch, same=same)
        queue.reopen(step, found)
        log.info("log: history %d, %d steps are trained again", found.history, len(found.replays))
        return found.history

    async def saved(self) -> bool:
        """Delete what neither a resume nor the recorded window needs; return whether there is a checkpoint.

        Raises:
            StorageError: a file could not be written or deleted.
        """
        if not (steps := directories.steps_of(self._config.run.dir)):
            return False
        await self._begin(steps, self._kept.begins(steps, self._since(steps)) or 0)
        return True

    async def shrink(self) -> bool:
        """Begin the recorded window at its next checkpoint if the log lacks room; return whether that was done. What a resume needs stays.

        Raises:
            StorageError: a file could not be written or deleted.
        """
        run_dir, section = self._config.run.dir, self._config.log
        try:
            reserve = 0 if section.redis else await asyncio.to_thread(directories.next_bytes, run_dir, section.place(run_dir))
            why = (await asyncio.to_thread(self.room)).lacking(section.max_bytes, reserve)
        except (OSError, DataError) as error:  # whoever needs the file reports it
            log.debug("log: %s", error)
            return False
        told, self._told = self._told, bool(why)
        if not why or not (steps := directories.steps_of(run_dir)):
            return False
        begin = self._kept.begins(steps, since := self._since(steps)) or 0
        later = [step for step in self._kept.starts(steps, since) if begin < step <= self._kept.oldest(steps)]
        if not later:
            return False
        await self._begin(steps, later[0])
        await asyncio.to_thread(directories.prune, run_dir, self._kept)
        if not told:
            left = len(self.queue_log.state.recorded)
            log.warning("log.keep: steps %d to %d are deleted: %s; %d steps are kept", begin + 1, later[0], why, left)
        return True

    def _since(self, steps: Sequence[int]) -> int:
        return max(directories.window_begins(self._config.run.dir), self.queue_log.state.recorded_since(steps[-1]))

    async def _begin(self, steps: Sequence[int], begin: int) -> None:
        """Begin the recorded window at a step, and delete the controller's older records."""
        run_dir = self._config.run.dir
        with storage.writing("the beginning of the recorded steps", run_dir / directories.FOLDER / directories.WINDOW):
            await asyncio.to_thread(directories.begin_window, run_dir, begin)
        log.info("log: %d bytes freed, besides payloads", await self.queue_log.forget(self._kept.oldest(steps), begin))


def backend(section: LogSection, run_dir: Path, run: str) -> tuple[Open, Measure]:
    """Return the functions that open a run's logs and measure their room. They raise as `FileLog` and `files.room`, or `RedisLog` and
    `RedisServer.room`. Raises UserError if the Redis client is not installed."""
    if section.redis is None:
        folder = section.place(run_dir)
        return lambda writer, most: FileLog(folder, run, writer, most), lambda writers: files.room(folder, writers)
    installed.need("redis", "log.redis")
    from asyncmoe.log import redis

    server = redis.RedisServer(section.redis)
    return lambda writer, most: redis.RedisLog(server, run, writer, most), lambda writers: server.room(run, writers)


def belonging_of(config: Config, recording: Recording) -> Belonging:
    """Return the run that a log belongs to; refuse a configuration that does not match. Raises as `belonging.read` and `check`."""
    run_dir, of, redis, folder = config.run.dir, identity(config, recording), config.log.redis is not None, str(config.log.folder or "")
    if (known := belonging.read(run_dir)) is None:
        return Belonging(belonging.FORM, of, redis, folder=folder)
    now = msgspec.structs.replace(known, of=of, redis=redis, folder=folder)
    if known.begun:
        belonging.check(known, now, run_dir)
    return now


def identity(config: Config, recording: Recording) -> dict[str, str]:
    """Return, by key, the values that must stay the same for a log's groups to be trained; `asyncmoe.models.origin` has those that must
    stay the same in any resumed run."""
    kept = {
        "run.seed": config.run.seed,
        "rollout.group_size": config.rollout.group_size,
        "keep.routing": "off" if recording.routing is None else "on",
        "keep.sampling_mask": "on" if recording.masks else "off",
        "objective.process.weight": "above 0" if recording.rewards else 0,
        "objective.distill.weight": "above 0" if recording.teacher else 0,
        "objective.score_centering": recording.top,
    }
    return {key: str(value) for key, value in kept.items()}
