"""The queue of `benchmarks.queue` with its trajectories in a site's store (queue.payloads)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from asyncmoe.config.queue import QueueSection
from asyncmoe.payloads.opening import open_store
from asyncmoe.payloads.writer import GroupWriter
from asyncmoe.queue.group_buffer import Group
from asyncmoe.trajectory import Routing, Trajectory
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


Measure = Callable[[list[Trajectory], Routing, QueueCase, bool, Store], Awaitable[dict[str, float]]]


def through_redis(made: list[Trajectory], routing: Routing, sizes: QueueCase, measure: Measure) -> dict[str, float]:
    """Redis on this machine, over TCP, without persistence."""
    with queue_peers.redis_server() as (client, port):
        section = QueueSection(payloads="redis", redis=f"redis://127.0.0.1:{port}")
        store = open_store(section)
        assert store is not None
        writer = GroupWriter(store, store.begin("bench"))

        async def run() -> dict[str, float]:
            return await measure(made, routing, sizes, False, Store(section, writer.put, lambda: queue_peers.redis_cpu_s(client)))

        try:
            return asyncio.run(run())
        finally:
            writer.close()
