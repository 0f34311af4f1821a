"""Buckets of whole tensors, which the sender broadcasts to paused engines (`asyncmoe.weights.sender.broadcast`)."""

from __future__ import annotations

from asyncmoe.engines.member import Member
from asyncmoe.errors import AsyncmoeError
from asyncmoe.rpc.messages import WeightsBucket, WeightsJoin
from asyncmoe.weights.coordinator import state
from asyncmoe.weights.coordinator.asking import on_each, raise_first
from asyncmoe.weights.coordinator.driver import UpdateDriver


async def join(driver: UpdateDriver, request: WeightsJoin) -> None:
    """Have all engines join the sender's process group.

    Raises:
        WeightSyncError: an engine is gone or refused.
    """
    members, roster = driver.whole(), driver.roster
    driver.group = request.group

    async def ask(member: Member) -> None:
        place = (request.host, request.port, roster.offset(member), roster.world, request.group, request.backend)
        await member.engine.client.join_group(*place, driver.timeout_s)

    raise_first(await on_each(members, ask), f"joining the weight group {request.group}")


async def begin(driver: UpdateDriver, version: int) -> None:
    """Open an update and pause the engines.

    Raises:
        WeightSyncError: another update is open, or an engine is gone or refused.
    """
    await driver.pause_all(driver.claim(version), "writing")


async def load(driver: UpdateDriver, request: WeightsBucket) -> None:
    """Have all engines load one bucket; if one fails, all are fenced at once, because the others wait for it in the broadcast.

    Raises:
        WeightSyncError: the update is not open, or an engine failed.
    """
    update = driver.expect(request.version)
    update.state = state.load_bucket(update.state)

    async def take(member: Member) -> None:
        try:
            await member.engine.client.load_bucket(request.names, request.dtypes, request.shapes, driver.group, driver.timeout_s)
        except AsyncmoeError as error:
            driver.fence_all(update, str(error))
            raise

    failed = await on_each(update.members, take)
    if failed:
        driver.close(update)
        raise_first(failed, f"loading version {update.version}")
