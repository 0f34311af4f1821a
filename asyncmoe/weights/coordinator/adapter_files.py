"""Versions that are adapters: files that every engine loads (`asyncmoe.engines.adapter_slots`); no engine pauses."""

from __future__ import annotations

from pathlib import Path

from asyncmoe.engines.member import Member
from asyncmoe.errors import WeightSyncError
from asyncmoe.rpc.messages import WeightsAdapter
from asyncmoe.weights.coordinator.asking import Failures, on_each
from asyncmoe.weights.coordinator.driver import UpdateDriver


async def publish(driver: UpdateDriver, request: WeightsAdapter) -> tuple[int, Failures]:
    """Have all engines sample new requests with a version; requests in progress keep theirs.

    Returns:
        The number of engines that serve it, and the engines that failed; they are fenced.

    Raises:
        WeightSyncError: an engine is gone, or was started without adapters.
    """
    members = driver.whole()
    without = [member.engine.name for member in members if member.slots is None]
    if without:
        raise WeightSyncError(f"{without[0]} was started without adapter loading (sync.method broadcast)")

    async def load(member: Member) -> None:
        assert member.slots is not None
        await member.slots.publish(request.version, Path(request.folder), driver.pool.lineage)
        member.serve(request.version, driver.pool.lineage)

    failed = await on_each(members, load)
    for member, error in failed:
        driver.pool.fence(member, str(error))
    return len(members) - len(failed), failed
