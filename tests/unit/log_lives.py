"""Logs of both backends, and the lives of a queue with a log: each may be killed, and the next resumes from its log."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from asyncmoe.config.queue import StalenessRule
from asyncmoe.log import turns
from asyncmoe.log.files import FileLog
from asyncmoe.log.log import Log
from asyncmoe.log.turns import Turns
from asyncmoe.queue.admission import Admission
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.queue_log import CONTROLLER, OWN, QueueLog
from asyncmoe.queue.records import Start
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.run_log import WorkerLog
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.workers.worker import Worker
from asyncmoe.rpc.messages import Leased
from asyncmoe.trajectory import Trajectory
from tests.redis_server import LocalRedis, needed
from tests.unit.test_queue_model import make_group

SIZE, BATCH = 2, 4


class KeptLog(QueueLog):
    """The controller's log, and the worker in its process, which writes the payloads."""

    def __init__(self, changes: Log, payloads: Log, answers: Log) -> None:
        super().__init__(changes)
        self._kept = WorkerLog(payloads, Turns(answers, {}))
        self.payloads, self.worker = payloads, Worker(_never, SIZE, kept=self._kept)

    @property
    def size(self) -> int:
        return self._changes.size + self.payloads.size

    async def forget(self, floor: int, recorded: int | None = None) -> int:
        before = self.size
        await super().forget(floor, floor if recorded is None else recorded)
        await self.worker.retain(self.state.payloads)
        settled(self.payloads)
        return before - self.size

    async def put(self, queue: BoundedQueue, made: Sequence[Trajectory]) -> None:
        await queue.put(await self.worker.hold(made, queue.newest_version))

    def close(self) -> None:
        self._kept.close()
        super().close()


async def _never(prompt: Prompt, place: EpisodeId) -> tuple[Trajectory, ...]:
    raise NotImplementedError


@dataclass
class Home:
    """Locations of logs: in folders, or in one server database per folder."""

    server: LocalRedis | None = None
    databases: dict[Path, int] = field(default_factory=dict)

    def number(self, folder: Path) -> int:
        return self.databases.setdefault(folder, len(self.databases))

    def log(self, folder: Path, writer: str, max_bytes: int | None = None, run: str = "run", segment_bytes: int = 1 << 12) -> Log:
        if self.server is None:
            return FileLog(folder / "log", run, writer, max_bytes, segment_bytes)
        from asyncmoe.log import redis

        return redis.RedisLog(redis.RedisServer(f"{self.server.url}?db={self.number(folder)}"), run, writer, max_bytes)

    def opened(self, folder: Path, max_bytes: int = 1 << 24) -> KeptLog:
        changes = self.log(folder, CONTROLLER)
        return KeptLog(changes, self.log(folder, str(OWN), max_bytes), self.log(folder, turns.writer(OWN)))

    def copy(self, folder: Path, to: Path) -> None:
        """What a kill of the writer leaves now."""
        if self.server is None:
            shutil.copytree(folder, to)
            return
        with self.server.client(self.number(folder)) as client:
            pipeline = client.pipeline(transaction=True)
            for key in client.keys("*"):
                if not key.endswith(b":lock"):
                    pipeline.copy(key, key, self.number(to))
            pipeline.execute()


@contextmanager
def home_of(backend: str) -> Iterator[Home]:
    with TemporaryDirectory() as folder:
        server = LocalRedis(Path(folder)) if backend == "redis" else None
        try:
            yield Home(server)
        finally:
            if server is not None:
                server.close()


@pytest.fixture(scope="module", params=["files", pytest.param("redis", marks=needed())])
def home(request: pytest.FixtureRequest) -> Iterator[Home]:
    """Each backend in turn."""
    with home_of(request.param) as made:
        yield made


def settled(log: Log) -> None:
    """Wait until all records of a log are written, so that they survive a kill."""
    log._turns.submit(int).result()


@dataclass
class Life:
    """One process's log and queue."""

    home: Home
    folder: Path
    log: KeptLog
    queue: BoundedQueue
    starts: Sequence[Start]
    next: int

    async def group(self, number: int, versions: Sequence[int] = (0, 0), attempt: int = 0) -> None:
        self.begin(number, attempt)
        await self.put(make_group(number, SIZE, list(versions)))

    async def put(self, made: Sequence[Trajectory]) -> None:
        await self.log.put(self.queue, made)

    def begin(self, number: int, attempt: int = 0) -> None:
        self.queue.started(SIZE)
        self.log.starts(Start(number, attempt))

    async def lease(self, step: int) -> Leased:
        return await self.queue.lease(step, "rl", BATCH, step, 5.0)

    async def fetched(self, leased: Leased) -> bytes:
        """Return the frames of a batch, as the worker of this life sends them: it holds them, or reads them from the log."""
        places = {item.key: item.place for item in leased.items if item.place is not None}
        return b"".join(map(bytes, await self.log.worker.fetch(places)))

    async def train(self, step: int, dropped: str = "") -> Leased:
        """Fill, lease and commit a step, and publish its version."""
        for number in (2 * step, 2 * step + 1):
            await self.group(number, (step, step))
        leased = await self.lease(step)
        self.queue.commit(step, dropped)
        self.queue.set_version(step + 1)
        return leased

    def kill(self, to: Path) -> Path:
        """End; return what a kill leaves."""
        settled(self.log._changes)
        settled(self.log.payloads)
        self.home.copy(self.folder, to)
        self.log.close()
        return to


async def live(home: Home, folder: Path, step: int = 0, rule: StalenessRule = "drop", max_bytes: int = 1 << 24) -> Life:
    """Open the log as a controller does whose trainer has taken `step` steps."""
    log = home.opened(folder, max_bytes)
    found = log.begin(step, 0, BATCH, step * BATCH // SIZE, lost=log.lost(step))
    queued = await log.groups(found.queued)
    sizes: dict[str, Any] = {"capacity": 4 * BATCH, "group_size": SIZE, "trained_steps": step}
    held = BoundedQueue(Admission(BATCH, 3, rule=rule), log, **sizes, resumed=found, queued=queued, on_freed=log.worker.forget)
    return Life(home, folder, log, held, held.take_requeued(), log.state.next)
