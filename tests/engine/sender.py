"""The trainer's part of a weight update, in this process: rank 0 of the weight group."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from asyncmoe.rpc.messages import Committed, EnginesAsk, WeightsBegin, WeightsBucket, WeightsCommit, WeightsJoin
from asyncmoe.weights.coordinator.coordinator import WeightUpdateCoordinator
from asyncmoe.weights.receiver import hosting
from asyncmoe.weights.sender import broadcast_group

Weights = Mapping[str, torch.Tensor]
TIMEOUT_S = 30.0


class Sender:
    """Sends whole checkpoints through a coordinator. Joins the group at the first one."""

    def __init__(self, coordinator: WeightUpdateCoordinator) -> None:
        self._coordinator = coordinator
        self._group: dist.ProcessGroup | None = None

    async def publish(self, version: int, weights: Weights, checksums: tuple[dict[str, str], ...] = (), buckets: int = 3) -> Committed:
        """Everything from begin to commit."""
        await self.begin(version)
        names = list(weights)
        for part in range(buckets):
            await self.bucket(version, weights, names[part::buckets])
        reply = await self._coordinator.handle(WeightsCommit(version, checksums))
        assert isinstance(reply, Committed)
        return reply

    async def begin(self, version: int) -> None:
        """Join if necessary, then pause the engines."""
        if self._group is None:
            self._group = await self._join()
        await self._coordinator.handle(WeightsBegin(version))

    async def bucket(self, version: int, weights: Weights, names: Sequence[str]) -> None:
        """Send some of the weights."""
        flat = torch.cat([weights[name].contiguous().view(-1).view(torch.uint8) for name in names])
        dtypes = tuple(str(weights[name].dtype).removeprefix("torch.") for name in names)
        request = WeightsBucket(version, tuple(names), dtypes, tuple(tuple(weights[name].shape) for name in names))
        await asyncio.gather(self._coordinator.handle(request), asyncio.to_thread(dist.broadcast, flat, src=0, group=self._group))

    async def _join(self) -> dist.ProcessGroup:
        engines = await self._coordinator.handle(EnginesAsk(TIMEOUT_S))
        # A process has one group per name, and every rig has its own group.
        name = f"weights-{id(self)}"
        hosted = hosting.host("loopback")
        request = WeightsJoin(*hosting.place(hosted), name, "gloo")
        joining = asyncio.to_thread(broadcast_group.join, hosted, engines.world, name, "gloo", TIMEOUT_S)
        return (await asyncio.gather(joining, self._coordinator.handle(request)))[0]
