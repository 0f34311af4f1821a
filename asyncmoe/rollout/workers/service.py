"""Answer requests to a rollout worker: the controller's, which start episodes, and those of the trainer's ranks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

from asyncmoe.config import Config
from asyncmoe.engines import backend
from asyncmoe.errors import AsyncmoeError, ProtocolError, TrajectoryRejected, UserError
from asyncmoe.log.turns import EpisodeId
from asyncmoe.queue.group_buffer import Group
from asyncmoe.rollout import parts
from asyncmoe.rollout.episodes.environments.tools import WithTools
from asyncmoe.rollout.parts import RolloutParts
from asyncmoe.rollout.run_log import WorkerLog
from asyncmoe.rollout.sampled_episodes import cleaned, to_bytes
from asyncmoe.rollout.scoring import trial
from asyncmoe.rollout.scoring.limits import LimitedScorer
from asyncmoe.rollout.tasks.types import from_bytes
from asyncmoe.rollout.workers.engines import Connect, LentEngines
from asyncmoe.rollout.workers.worker import Worker, worker_of
from asyncmoe.rpc.codec import MAX_FRAME_BYTES
from asyncmoe.rpc.messages import Done, Fetched, Reply, Request
from asyncmoe.rpc.worker_messages import (
    LOST,
    Busy,
    Figures,
    PackedGroup,
    WorkerAsk,
    WorkerBegin,
    WorkerBegun,
    WorkerEnd,
    WorkerEngines,
    WorkerFetch,
    WorkerForget,
    WorkerNews,
    WorkerPack,
    WorkerPacked,
    WorkerRan,
    WorkerRun,
    WorkerShow,
)
from asyncmoe.trajectory import Buffer, Recording

log = logging.getLogger(__name__)
_MOST_SAMPLED = MAX_FRAME_BYTES // 2
"""Maximum bytes of an episode's records for readers of samples, which are sent in one message."""
_MOST_BUSY = 1 << 14
"""Maximum intervals kept until the controller asks; older ones are dropped."""
_TOKENS = ("generated_tokens", "lost_tokens", "recomputed_tokens", "recalled_tokens")
_NEWS_S, _MOST_DETAIL = 0.25, 2000
"""Seconds between news; characters kept of the reason of a rejection."""


class WorkerService:
    """Answers requests with a worker. For one event loop.

    Args:
        number: number of the worker.
        loaded: what episodes need, or the error that answers the controller's first request.
        recording: what engines report of each token.
        connect: as `asyncmoe.engines.backend.connect`.

    Attributes:
        over: set when the run is over, or the worker must end.
        heard: monotonic time of the controller's last request.
        pool: the engines.
    """

    def __init__(
        self,
        config: Config,
        number: int,
        loaded: RolloutParts | UserError,
        recording: Recording,
        connect: Connect = backend.connect,
    ) -> None:
        self.over, self.heard = asyncio.Event(), time.monotonic()
        self._config, self._number, self._loaded, self._recording = config, number, loaded, recording
        self._busy = deque[Busy](maxlen=_MOST_BUSY)
        self.pool = parts.pool_of(config, config.worker_share(number), lambda *interval: self._busy.append(interval))
        self.pool.returns = lambda _: True  # only the controller knows when no engine will return
        self._engines = LentEngines(self.pool, connect)
        self._worker: Worker | None = None
        self._kept: WorkerLog | None = None

    async def answer(self, request: Request) -> Reply | tuple[Reply, list[Buffer]]:
        """Answer one request.

        Raises:
            ProtocolError: it is out of turn, not for a worker, or for a trajectory that this worker does not hold.
            TrajectoryRejected: a group to pack is unfit for training.
            StorageError: the log cannot be written.
            AsyncmoeError: an episode failed in a way that ends the run.
        """
        if not isinstance(request, WorkerFetch):  # that comes from a trainer's rank
            self.heard = time.monotonic()
        if isinstance(request, WorkerBegin):
            return await self._begin(request)
        if self._worker is None:
            raise ProtocolError(f"{type(request).__name__}: sent before any WorkerBegin, expected WorkerBegin first")
        return await self._do(self._worker, request)

    async def _do(self, worker: Worker, request: Request) -> Reply | tuple[Reply, list[Buffer]]:
        match request:
            case WorkerFetch():
                return Fetched(), await worker.fetch(request.places, request.layers, request.masks)
            case WorkerEngines():
                await self._engines.use(request)
                return self._news()
            case WorkerAsk():  # waits, so that the controller always has a pending request that fails with the connection
                await asyncio.sleep(_NEWS_S)
                return self._news()
            case WorkerRun():
                return await self._run(worker, request)
            case WorkerShow():
                return _packed(await worker.show(request.first, request.count))
            case WorkerPack():
                return _packed([await worker.pack(request.episodes, request.newest)])
            case WorkerForget():
                worker.forget(request.groups, request.episodes)
                if request.needed is not None:
                    await worker.retain(request.needed)
            case WorkerEnd():
                self.over.set()
            case _:
                raise ProtocolError(f"{type(request).__name__}: sent to a rollout worker, expected at the controller")
        return Done()

    async def close(self) -> None:
        """Close the engines and the log, after all episodes have ended."""
        await self._engines.close()
        if self._kept is not None:
            await asyncio.to_thread(self._kept.close)

    async def _begin(self, request: WorkerBegin) -> WorkerBegun:
        if self._kept is not None:
            raise ProtocolError("WorkerBegin: sent twice, expected once; a worker serves one controller")
        config, loaded = self._config, self._loaded
        if isinstance(loaded, UserError):
            raise loaded
        if request.first:
            await trial.before_engines(config, loaded, loaded.scorer, loaded.teacher)
        opened = config.log, config.run.dir, request.log, self._number, request.under_way
        self._kept = kept = await asyncio.to_thread(WorkerLog.open, *opened)  # reads all records
        self._worker = worker_of(config, loaded, self.pool, self._recording, self._number, kept)
        return WorkerBegun(tuple(sorted(kept.turns.groups)))

    async def _run(self, worker: Worker, request: WorkerRun) -> WorkerRan:
        place, asked = request.episode, from_bytes(request.prompt)
        try:
            if request.evaluation is not None:
                return WorkerRan(await worker.evaluate(request.evaluation, asked, place))
            return WorkerRan(await worker.episode(asked, place), sampled=_sampled(worker, place))
        except asyncio.CancelledError:  # the episode is forgotten, or the worker ends
            return WorkerRan(reason=LOST, detail="it was stopped")
        except TrajectoryRejected as rejected:
            detail = cleaned(str(rejected).removeprefix(f"{rejected.reason}: ")[:_MOST_DETAIL])
            return WorkerRan((), rejected.reason, detail, b"" if request.evaluation is not None else _sampled(worker, place))
        except Exception as error:  # the controller raises it, and ends the run
            text = str(error) if isinstance(error, AsyncmoeError) else f"{type(error).__name__}: {error}"
            raise AsyncmoeError(cleaned(text[:_MOST_DETAIL])) from error

    def _news(self) -> WorkerNews:
        pool, loaded = self.pool, self._loaded
        assert not isinstance(loaded, UserError)
        pool.note_busy()
        busy = tuple(self._busy)
        self._busy.clear()
        tokens = {name: getattr(pool, name) for name in _TOKENS}
        for name in _TOKENS:
            setattr(pool, name, 0)
        return WorkerNews(self._engines.uses(), busy, tokens, figures_of(loaded))


def _sampled(worker: Worker, place: EpisodeId) -> bytes:
    """Take an episode's records for readers of samples; empty if there are none, or too large for a message."""
    if not (left := worker.left.pop(place, ())):
        return b""
    if len(made := to_bytes(left)) > _MOST_SAMPLED:
        log.warning("%s is not kept as a sample: it has %d bytes, more than %d", place.key(), len(made), _MOST_SAMPLED)
        return b""
    return made


def _packed(groups: Sequence[Group]) -> WorkerPacked:
    return WorkerPacked(tuple(PackedGroup(group.items, group.attempt, group.place) for group in groups))


def figures_of(loaded: RolloutParts) -> Figures:
    """Return the statistics of this process."""
    environment, stages = loaded.environment, {"scorer": loaded.scorer, "teacher": loaded.teacher}
    scoring = {name: stage.stats() for name, stage in stages.items() if isinstance(stage, LimitedScorer)}
    return Figures(scoring, environment.counts if isinstance(environment, WithTools) else {})
