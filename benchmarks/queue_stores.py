"""The queue of `benchmarks.queue` with its trajectories in a site's store (queue.payloads)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass

from asyncmoe.config.queue import QueueSection
from asyncmoe.payloads.opening import open_store
from asyncmoe.payloads.writer import GroupWriter
from asyncmoe.queue.group_buffer import Group
from asyncmoe.trajectory import Routing, Trajectory, encode
from benchmarks import queue_peers
from benchmarks.queue_case import QueueCase

AT_ONCE = 4
"""Groups that are put at the same time."""


@dataclass(frozen=True)
class Store:
    """A store as the benchmark's queue and ranks use it. `cpu_s`: seconds of CPU time that its server has taken."""

    section: QueueSection
    keep: Callable[[Group], Awaitable[Group]]
    cpu_s: Callable[[], float]


Measure = Callable[[list[Trajectory], Routing, QueueCase, bool, Store], Coroutine[None, None, dict[str, float]]]


def through_redis(made: list[Trajectory], routing: Routing, sizes: QueueCase, measure: Measure) -> dict[str, float]:
    """Redis on this machine, over TCP, without persistence."""
    with queue_peers.redis_server() as (client, port):
        section = QueueSection(payloads="redis", redis=f"redis://127.0.0.1:{port}")
        return _measured(made, routing, sizes, measure, section, lambda: queue_peers.redis_cpu_s(client))


def through_ray(made: list[Trajectory], routing: Routing, sizes: QueueCase, measure: Measure) -> dict[str, float]:
    """Ray on this machine; the processor time is without that of its own processes."""
    size = sum(memoryview(frame).nbytes for frame in encode(made[0]))
    with queue_peers.ray_node(size, sizes) as ray:
        before, os.environ["RAY_ADDRESS"] = os.environ.get("RAY_ADDRESS"), ray.get_runtime_context().gcs_address  # for the ranks
        try:
            return _measured(made, routing, sizes, measure, QueueSection(payloads="ray"), lambda: 0.0)
        finally:
            del os.environ["RAY_ADDRESS"]
            if before is not None:
                os.environ["RAY_ADDRESS"] = before


WAYS: dict[str, Callable[[list[Trajectory], Routing, QueueCase, Measure], dict[str, float]]] = {"redis": through_redis, "ray": through_ray}


def _measured(
    made: list[Trajectory], routing: Routing, sizes: QueueCase, measure: Measure, section: QueueSection, cpu_s: Callable[[], float]
) -> dict[str, float]:
    store = open_store(section)
    assert store is not None
    prefix = store.begin("bench")
    writer = GroupWriter(store, prefix)

    async def run() -> dict[str, float]:
        return await measure(made, routing, sizes, False, Store(section, writer.put, cpu_s))

    try:
        return asyncio.run(run())
    finally:
        store.clear(prefix)
        writer.close()
