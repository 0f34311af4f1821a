"""Shards that the receivers inside the engines take from the trainer's ranks (`asyncmoe.weights.receiver`)."""

from __future__ import annotations

from asyncmoe.engines.member import Member
from asyncmoe.platform.sglang.receiver_command import CommitCommand, JoinCommand
from asyncmoe.rpc.messages import WeightsJoin, WeightsStage
from asyncmoe.weights.coordinator import state
from asyncmoe.weights.coordinator.asking import Failures, raise_first
from asyncmoe.weights.coordinator.driver import OpenUpdate, UpdateDriver


async def start_receivers(driver: UpdateDriver, request: WeightsJoin) -> None:
    """Start the receivers, while the engines generate.

    Raises:
        WeightSyncError: another update is open, or an engine is gone or refused.
    """
    update = driver.claim(driver.pool.version)
    roster = driver.roster  # of the update's members; `EnginesAsk` may replace the driver's meanwhile

    async def start(member: Member) -> None:
        first = request.senders + roster.offset(member) - 1
        joins = [JoinCommand(request.host, request.port, request.group, first + rank) for rank in range(member.engine.tp)]
        async with driver.soon(member, "start its weight receivers"):
            await member.engine.client.command_receivers(joins, driver.timeout_s)

    failed = await driver.fencing(update, start)
    driver.close(update)
    raise_first(failed, "starting the weight receivers")


def stage(driver: UpdateDriver, request: WeightsStage) -> OpenUpdate:
    """Open an update whose weights the receivers stage while the engines generate.

    Raises:
        WeightSyncError: another update is open, or an engine is gone.
    """
    return driver.claim(request.version, staged=True)


async def stage_in_place(driver: UpdateDriver, update: OpenUpdate) -> None:
    """Pause the engines of a new update, because its receivers write the weights themselves, without staging memory.

    Raises:
        WeightSyncError: an engine refused.
    """
    await driver.pause_all(update, "writing")
    update.state = state.load(update.state)


async def swap(driver: UpdateDriver, update: OpenUpdate, number: int) -> Failures:
    """Have each rank of the paused engines swap in the weights it received.

    Args:
        number: the number under which all receivers reported the version as received.

    Returns:
        The engines that failed; they are fenced.
    """
    update.state = state.load(update.state)

    async def commit(member: Member) -> None:
        commits = [CommitCommand(update.version, number)] * member.engine.tp
        async with driver.soon(member, f"swap in version {update.version}"):  # each rank has reported that it has received all of it
            await member.engine.client.command_receivers(commits, driver.timeout_s, update.version)

    return await driver.fencing(update, commit)
