"""What a rollout worker does with a group before it is queued, and a controller and its worker behind one socket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from asyncmoe.log.log import Place
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.group_buffer import whole
from asyncmoe.queue.service import QueueService
from asyncmoe.rollout.workers.worker import Worker
from asyncmoe.rpc.messages import Fetched, FindWorker, WorkerFound
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.rpc.worker_messages import WorkerFetch
from asyncmoe.trajectory import NOTHING, Recording, Trajectory


async def put_group(queue: BoundedQueue, trajectories: Sequence[Trajectory]) -> None:
    """Check a whole group, and queue it."""
    await queue.put(whole(trajectories, queue._group_size, NOTHING, queue.newest_version))


async def _never(*_: object) -> tuple[Trajectory, ...]:
    raise NotImplementedError


class Holding:
    """Answers a trainer's ranks as the controller and the worker do. `rendezvous`: of its server, once there is one."""

    def __init__(self, queue: BoundedQueue, recording: Recording = NOTHING) -> None:
        self.queue, self.worker = queue, Worker(_never, queue._group_size, recording)
        self.service = QueueService(queue, run="r", config_digest="")
        self.rendezvous: Rendezvous | None = None

    async def put(self, trajectories: Sequence[Trajectory]) -> None:
        """Check, hold and queue a group."""
        group = await self.worker.hold(trajectories, self.queue.newest_version)
        await self.queue.put(replace(group, frames={}, place=Place(1, 0)))

    async def answer(self, request: Any) -> Any:
        """Answer a request."""
        if isinstance(request, FindWorker):
            return WorkerFound(self.rendezvous)
        if isinstance(request, WorkerFetch):
            return Fetched(), await self.worker.fetch(request.keys, request.places, request.layers, request.masks)
        return await self.service(request)
