"""A rollout worker: runs the episodes that the controller starts, and holds what they bring until the controller says that it is over."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace

import msgspec

from asyncmoe.config import Config
from asyncmoe.engines import backend
from asyncmoe.errors import AsyncmoeError, ProtocolError, TrajectoryRejected
from asyncmoe.rollout import parts, run_log
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.parts import RolloutParts
from asyncmoe.rollout.sampled_episodes import EpisodeNotes, cleaned, to_bytes
from asyncmoe.rollout.tasks.types import Prompt, from_bytes
from asyncmoe.rollout.workers.engines import Connect, LentEngines
from asyncmoe.rollout.workers.figures import figures_of
from asyncmoe.rollout.workers.held import HeldGroups
from asyncmoe.rollout.workers.news import UnheardOutcomes
from asyncmoe.rollout.workers.outcome import RUN_FAILED
from asyncmoe.rpc.codec import MAX_FRAME_BYTES
from asyncmoe.rpc.messages import Done, Fetched, Reply, Request
from asyncmoe.rpc.worker_messages import (
    EpisodeOutcome,
    WorkerAsk,
    WorkerBegin,
    WorkerBegun,
    WorkerEnd,
    WorkerEngines,
    WorkerFetch,
    WorkerLoad,
    WorkerNews,
    WorkerOver,
    WorkerPack,
    WorkerPacked,
    WorkerRetain,
    WorkerStart,
    WorkerStop,
    WorkerTotals,
)
from asyncmoe.telemetry.samples.choice import choice_of
from asyncmoe.trajectory import Buffer, Recording, Trajectory

log = logging.getLogger(__name__)
_MOST_SAMPLED = MAX_FRAME_BYTES // 2
"""Bytes that an episode may leave for readers of samples, which are sent in one message."""
_MOST_DETAIL = 2000
"""Characters kept of why an episode was rejected."""


class RolloutWorker:
    """Answers the controller and the trainer's ranks. For one event loop.

    Args:
        number: of the worker.
        recording: what engines report of each token.
        connect: as `asyncmoe.engines.backend.connect`.

    Attributes:
        over: set when the run is over.
        heard: monotonic time of the controller's last request.
    """

    def __init__(self, config: Config, number: int, loaded: RolloutParts, recording: Recording, connect: Connect = backend.connect) -> None:
        self.over, self.heard = asyncio.Event(), time.monotonic()
        self._loaded = loaded
        self._config, self._number, self._begun = config, number, False
        self._engines, self._held = LentEngines(connect), HeldGroups(config, number, recording)
        self._pool = parts.pool_of(config, self._engines.record)
        self._pool.returns = lambda _: True  # the controller knows when none will come
        self._notes = EpisodeNotes(choice_of(config))
        self._stage = replace(parts.context_of(config, loaded, self._pool, recording), opened=self._notes.opened)
        self._running: dict[EpisodeId, asyncio.Task[None]] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._ended: dict[EpisodeId, tuple[Trajectory, ...]] = {}
        self._news, self._arrived = UnheardOutcomes(), asyncio.Event()

    async def answer(self, request: Request) -> Reply | tuple[Reply, list[Buffer]]:
        """Answer one request.

        Raises:
            ProtocolError: it is out of turn, not for a worker, or about what this worker does not hold.
            TrajectoryRejected: a group to pack is unfit for training.
            StorageError: the log cannot be written.
        """
        if isinstance(request, WorkerFetch):  # a trainer's rank asks
            return Fetched(request.keys), self._held.fetch(request)
        self.heard = time.monotonic()
        if isinstance(request, WorkerBegin):
            begun = WorkerBegun(await asyncio.to_thread(self._begin, request))  # reads all that was recorded
            self.heard = time.monotonic()
            return begun
        if not self._begun:
            raise ProtocolError(f"{type(request).__name__}: got it before WorkerBegin")
        match request:
            case WorkerEngines():
                await self._engines.use(self._pool, request)
                return WorkerLoad(self._engines.uses(self._pool))
            case WorkerPack():
                return await self._pack(request)
            case WorkerAsk():
                return await self._tell(request)
        await self._do(request)
        return Done()

    async def _do(self, request: Request) -> None:
        match request:
            case WorkerStart():
                self._start(request)
            case WorkerStop():
                for member in request.members:
                    self._stop(EpisodeId(request.group, member.episode, member.attempt))
            case WorkerOver():
                for group in request.groups:
                    self._forget(group)
            case WorkerRetain():
                await self._held.retain(request.below)
            case WorkerEnd():
                self.over.set()
            case _:
                raise ProtocolError(f"{type(request).__name__}: got it at a rollout worker, expected it at the controller")

    def look(self) -> None:
        """Notice whether this process stands still (`asyncmoe.engines.standstill`); call it twice a second."""
        self._pool.look()

    async def close(self) -> None:
        """End all episodes, and close what is open."""
        running = [*self._running.values(), *self._stopping]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._engines.close(self._pool)
        await asyncio.to_thread(self._held.close)
        if self._stage.turns is not None:
            await asyncio.to_thread(self._stage.turns.close)

    def _begin(self, request: WorkerBegin) -> tuple[int, ...]:
        if self._begun:
            raise ProtocolError("WorkerBegin: got it twice; a worker serves one controller")
        section = self._config.log
        if request.log:
            opened = run_log.opener(section, self._config.run.dir, request.log)
            self._held.log = opened(str(self._number), section.max_bytes)
            turns = run_log.turns_of(opened, section, self._number, request.under_way)
            self._stage = replace(self._stage, turns=turns, piece=section.piece_tokens)
        self._begun = True
        return () if self._stage.turns is None else tuple(sorted(self._stage.turns.groups))

    def _start(self, request: WorkerStart) -> None:
        try:
            prompt = from_bytes(request.prompt)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"WorkerStart: malformed prompt: {error}") from error
        for member in request.members:
            place = EpisodeId(request.group, member.episode, member.attempt)
            if place in self._running or place in self._ended:
                raise ProtocolError(f"WorkerStart: got {place.key()} twice")
            self._running[place] = asyncio.create_task(self._episode(prompt, place))

    async def _episode(self, prompt: Prompt, place: EpisodeId) -> None:
        ended, made = EpisodeOutcome(place.group, place.episode, place.attempt), tuple[Trajectory, ...]()
        try:
            made = await episode.run(self._stage, prompt, place)
            sampled = self._sampled(place, made)
            ended = msgspec.structs.replace(ended, rewards=tuple((one.agent, one.reward) for one in made), sampled=sampled)
        except TrajectoryRejected as rejected:
            detail = str(rejected).removeprefix(f"{rejected.reason}: ")
            sampled = self._sampled(place, rejected)
            ended = msgspec.structs.replace(ended, reason=rejected.reason, detail=cleaned(detail[:_MOST_DETAIL]), sampled=sampled)
        except Exception as error:  # noqa: BLE001  the controller raises it, and ends the run
            text = str(error) if isinstance(error, AsyncmoeError) else f"{type(error).__name__}: {error}"
            ended = EpisodeOutcome(place.group, place.episode, place.attempt, reason=RUN_FAILED, detail=cleaned(text[:_MOST_DETAIL]))
        if self._running.get(place) is not asyncio.current_task():
            return  # it was stopped while it ended
        del self._running[place]
        if ended.rewards:
            self._ended[place] = made
        self._news.add(ended)
        self._arrived.set()

    def _stop(self, place: EpisodeId) -> None:
        # At once: the next attempt of its group may have an episode of the same name.
        self._notes.cancelled(place)
        self._ended.pop(place, None)
        if (task := self._running.pop(place, None)) is not None:
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)
            task.cancel()

    def _sampled(self, place: EpisodeId, outcome: tuple[Trajectory, ...] | TrajectoryRejected) -> bytes:
        left = self._notes.ended(place, outcome)
        made = b"" if left is None else to_bytes(left)
        if len(made) > _MOST_SAMPLED:
            log.warning("%s is not kept to be read: it takes %d bytes, more than %d", place.key(), len(made), _MOST_SAMPLED)
            return b""
        return made

    async def _pack(self, request: WorkerPack) -> WorkerPacked:
        places = [EpisodeId(request.group, member.episode, member.attempt) for member in request.members]
        if missing := [place.key() for place in places if place not in self._ended]:
            raise ProtocolError(f"WorkerPack: got {missing[0]}, expected episodes that have ended here")
        packed = await self._held.add(request.group, [one for place in places for one in self._ended[place]], request.newest)
        self._forget_episodes(request.group)
        if self._stage.turns is not None:
            self._stage.turns.over(request.group)
        return packed

    def _forget(self, group: int) -> None:
        self._held.over(group)
        self._forget_episodes(group)
        if self._stage.turns is not None:
            self._stage.turns.over(group)

    def _forget_episodes(self, group: int) -> None:
        for place in [place for place in self._ended if place.group == group]:
            del self._ended[place]

    async def _tell(self, asked: WorkerAsk) -> WorkerNews:
        self._news.heard(asked.seen)
        if not self._news:
            self._arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(asked.wait_s):
                    await self._arrived.wait()
        pool, engines = self._pool, self._engines
        pool.note_busy()
        busy = tuple(engines.busy)
        engines.busy.clear()
        totals = WorkerTotals(pool.generated_tokens, pool.lost_tokens, pool.recomputed_tokens, pool.recalled_tokens)
        (number, ended), figures = self._news.portion(), msgspec.msgpack.encode(figures_of(self._loaded))
        return WorkerNews(number, ended, engines.uses(pool), busy, totals, figures)
