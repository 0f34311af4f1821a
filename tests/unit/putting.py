"""The steps of a rollout worker before a group is queued."""

from __future__ import annotations

from collections.abc import Sequence

from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.group_buffer import whole
from asyncmoe.trajectory import NOTHING, Trajectory


async def put_group(queue: BoundedQueue, trajectories: Sequence[Trajectory]) -> None:
    """Check a whole group, and queue it."""
    await queue.put(whole(trajectories, queue._group_size, NOTHING, queue.newest_version)[0])
