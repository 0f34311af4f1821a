"""Versions that are adapters: files that every engine loads (`asyncmoe.rollout.engines.adapter_slots`); no engine pauses."""

from __future__ import annotations

from pathlib import Path

from asyncmoe.errors import WeightSyncError
from asyncmoe.rollout.engines.pool import Member
from asyncmoe.rollout.engines.weight_updates.driver import UpdateDriver, on_each, raise_first
from asyncmoe.rpc.messages import WeightsAdapter


async def publish(driver: UpdateDriver, request: WeightsAdapter) -> int:
    """Have all engines sample new requests with a version; requests in progress keep theirs.

    Returns:
        The number of engines.

    Raises:
        WeightSyncError: an engine is gone or refused, or was started without adapters.
    """
    members = driver.whole()

    async def load(member: Member) -> None:
        if member.slots is None:
            raise WeightSyncError(f"{member.engine.name} was started without adapter loading (sync.method broadcast)")
        await member.slots.publish(request.version, Path(request.folder))
        member.version, member.waiting = request.version, False

    failed = await on_each(members, load)
    for member, error in failed:
        driver.pool.fence(member, str(error))
    raise_first(failed, f"publishing version {request.version}")
    return len(members)
