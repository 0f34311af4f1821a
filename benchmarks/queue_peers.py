"""The same trajectories through Redis and Ray, as their users would send them. Both are optional: `requirements/bench.txt`."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from asyncmoe.errors import WaitTimeout
from asyncmoe.trajectory import Buffer, decode
from benchmarks.queue_case import QueueCase, Ranks, expect_all, figures
from benchmarks.queue_rank import GROUP, RANKS, STREAM, Job, Took

Frames = Sequence[Sequence[Buffer]]
_START_S = 30.0
_WORK_S = 300.0


def absent(peer: str) -> str:
    """Why a peer cannot be measured here, or nothing."""
    if importlib.util.find_spec(peer) is None:
        return f"absent: the Python package {peer} is not installed"
    if peer == "redis" and shutil.which("redis-server") is None:
        return "absent: there is no redis-server"
    return ""


def through_redis(made: Frames, sizes: QueueCase) -> dict[str, float]:
    """A stream with a consumer group, in a server without persistence; an entry has the frames as its fields."""
    with redis_server() as (client, port):
        client.xgroup_create(STREAM, GROUP, mkstream=True)
        begin = time.monotonic()
        for first in range(0, sizes.steps * sizes.batch, sizes.ask):
            pipeline = client.pipeline(transaction=False)
            for i in range(first, min(first + sizes.ask, sizes.steps * sizes.batch)):
                pipeline.xadd(STREAM, {str(n): bytes(frame) for n, frame in enumerate(made[i % len(made)])})
            pipeline.execute()
        put_s = time.monotonic() - begin
        return asyncio.run(_drain_redis(client, port, sizes, put_s))


@contextmanager
def redis_server() -> Iterator[tuple[Any, int]]:
    """Yield a client and the port of a server of this machine without persistence."""
    import redis

    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder)
        server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
        try:
            client = redis.Redis(port=port, socket_timeout=_WORK_S)
            _wait_until_up(client, redis.ConnectionError)
            yield client, port
        finally:
            server.kill()
            server.wait()


def redis_cpu_s(client: Any) -> float:
    """Seconds of CPU time that a server has taken."""
    used = client.info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])


async def _drain_redis(client: Any, port: int, sizes: QueueCase, put_s: float) -> dict[str, float]:
    ranks = await Ranks.start([Job("redis", str(port), rank, sizes.steps, sizes.batch, sizes.ask) for rank in range(RANKS)])
    try:
        before = redis_cpu_s(client)
        took = await ranks.go()
        after = redis_cpu_s(client)
    finally:
        await ranks.end()
    expect_all(took, sizes)
    return figures(took, after - before, put_s)


def through_ray(made: Frames, sizes: QueueCase) -> dict[str, float]:
    """Objects of NumPy arrays in Ray's store, an actor that hands out their references, and two workers that get and decode them.

    The processor time is the workers' alone: Ray's own processes are not counted.
    """
    import numpy as np

    with ray_node(sum(memoryview(frame).nbytes for frame in made[0]), sizes) as ray:
        queue = ray.remote(_Queue).remote()
        workers = [ray.remote(_Worker).remote(queue) for _ in range(RANKS)]
        ray.get([worker.ready.remote() for worker in workers], timeout=_WORK_S)
        arrays = [[np.frombuffer(frame, np.uint8) for frame in frames] for frames in made]
        begin = time.monotonic()
        for i in range(sizes.steps * sizes.batch):
            ray.get(queue.put.remote([ray.put(arrays[i % len(arrays)])]), timeout=_WORK_S)
        put_s = time.monotonic() - begin
        share = sizes.steps * sizes.batch // RANKS
        took = [Took(**one) for one in ray.get([worker.work.remote(share, sizes.ask) for worker in workers], timeout=_WORK_S)]
    expect_all(took, sizes)
    return figures(took, 0.0, put_s)


@contextmanager
def ray_node(size: int, sizes: QueueCase) -> Iterator[Any]:
    """Yield the module, connected to a cluster of this process, which has room for all trajectories of `size` bytes."""
    import ray

    store = sizes.steps * sizes.batch * size * 5 // 4 + (256 << 20)
    ray.init(num_cpus=RANKS + 1, object_store_memory=store, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        yield ray
    finally:
        ray.shutdown()


class _Queue:
    """An actor."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def put(self, references: list[Any]) -> None:
        self._held.extend(references)

    def take(self, count: int) -> list[Any]:
        taken, self._held = self._held[:count], self._held[count:]
        return taken


class _Worker:
    """An actor; a trainer's rank."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def ready(self) -> None:
        pass

    def work(self, share: int, ask: int) -> dict[str, float]:
        import ray

        begin, spent = time.monotonic(), time.process_time()
        count: dict[str, Any] = {"requests": 0, "trajectories": 0, "tokens": 0, "bytes": 0}
        while count["trajectories"] < share:
            references = ray.get(self._queue.take.remote(min(ask, share - count["trajectories"])), timeout=_WORK_S)
            for frames in ray.get(references, timeout=_WORK_S):
                count["tokens"] += len(decode([frame.data for frame in frames]))
                count["trajectories"] += 1
                count["bytes"] += sum(frame.nbytes for frame in frames)
            count["requests"] += 2
        return {"begin": begin, "end": time.monotonic(), "processor": time.process_time() - spent, **count}


PEERS: dict[str, Callable[[Frames, Any], dict[str, float]]] = {"redis": through_redis, "ray": through_ray}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _wait_until_up(client: Any, refused: type[Exception]) -> None:
    begin = time.monotonic()
    while True:
        try:
            client.ping()
        except refused:
            if time.monotonic() - begin > _START_S:
                raise WaitTimeout("redis-server", "to answer; see its log", _START_S) from None
            time.sleep(0.05)
        else:
            return
