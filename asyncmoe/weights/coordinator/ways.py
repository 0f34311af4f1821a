"""The calls to engines in each way of publishing; `coordinator/__init__.py` lists their order."""

from __future__ import annotations

import asyncio

from asyncmoe.engines.member import Member
from asyncmoe.errors import AsyncmoeError, WeightSyncError
from asyncmoe.platform.sglang.receiver_command import CommitCommand, JoinCommand
from asyncmoe.rpc.messages import WeightsBucket, WeightsJoin
from asyncmoe.telemetry.clock import unix
from asyncmoe.weights.coordinator import state
from asyncmoe.weights.coordinator.driver import PATIENCE, Failures, OpenUpdate, UpdateDriver, on_each, raise_first

# ---------------------------------------------------------------- buckets of whole tensors (`asyncmoe.weights.sender.broadcast`)


async def join_group(driver: UpdateDriver, request: WeightsJoin) -> None:
    """Have all engines join the sender's process group.

    Raises:
        WeightSyncError: an engine is gone or refused.
    """
    members, roster = driver.whole(), driver.roster
    driver.group = request.group

    async def ask(member: Member) -> None:
        await member.engine.client.join_group(request, roster.offset(member), roster.world, driver.timeout_s)

    raise_first(await on_each(members, ask), f"joining the weight group {request.group}")


async def load_bucket(driver: UpdateDriver, request: WeightsBucket) -> None:
    """Have all engines load one bucket; if one fails, all are fenced at once, because the others wait for it in the broadcast.

    Raises:
        WeightSyncError: the update is not open, or an engine failed.
    """
    update = driver.expect(request.version)
    update.state = state.load_bucket(update.state)

    async def take(member: Member) -> None:
        try:
            await member.engine.client.load_bucket(request, driver.group, driver.timeout_s)
        except AsyncmoeError as error:
            driver.fence_all(update, str(error))
            raise

    failed = await on_each(update.members, take)
    if failed:
        driver.close(update)
        raise_first(failed, f"loading version {update.version}")


# ---------------------------------------------------------------- shards for receivers (`asyncmoe.weights.receiver`)


async def start_receivers(driver: UpdateDriver, request: WeightsJoin) -> None:
    """Start the receivers, while the engines generate.

    Raises:
        WeightSyncError: another update is open, or an engine is gone or refused.
    """
    update = driver.claim(driver.pool.version)
    roster = driver.roster  # the roster of the update's members; `EnginesAsk` may replace the driver's meanwhile

    async def start(member: Member) -> None:
        first = request.senders + roster.offset(member) - 1
        joins = [JoinCommand(request.host, request.port, request.group, first + rank) for rank in range(member.engine.tp)]
        async with driver.soon(member, "to start its weight receivers"):
            await member.engine.client.command_receivers(joins, driver.timeout_s)

    failed = await driver.fencing(update, start)
    driver.close(update)
    raise_first(failed, "starting the weight receivers")


async def pause_for_writing(driver: UpdateDriver, update: OpenUpdate) -> None:
    """Pause the engines of a new update whose receivers write the weights in place, without staging memory.

    Raises:
        WeightSyncError: an engine refused.
    """
    await driver.pause_all(update, "writing")
    update.state = state.load(update.state)


async def swap(driver: UpdateDriver, update: OpenUpdate, number: int) -> Failures:
    """Have each rank of the paused engines swap in the weights it received.

    Args:
        number: the update number under which all receivers reported the version as received.

    Returns:
        The engines that failed; they are fenced.
    """
    update.state = state.load(update.state)
    return await driver.fencing(update, lambda member: _commit(driver, update, number, member))


async def swap_at_once(driver: UpdateDriver, update: OpenUpdate, number: int) -> tuple[Failures, list[float]]:
    """Close the gate, and have each engine swap in its received weights between two forward passes, in one call, so that no engine idles
    for a round trip to this process.

    An engine that takes longer than `PATIENCE` of `pause_s` may hang: requests then go to the engines that have the version, until the late
    one has it too or is fenced.

    Args:
        number: as for `swap`.

    Returns:
        The engines that failed, which are fenced, and the pauses of the others in seconds, each from the call to its answer.

    Raises:
        WeightSyncError: the update was given up before any engine was asked.
    """
    await driver.close_gate(update)
    if driver.current is not update:
        driver.pool.release()
        raise WeightSyncError(f"version {update.version} was given up before engines swapped it in")
    update.state = state.conclude(state.load(update.state))
    driver.pool.hold()
    await driver.pool.held()
    pauses: list[float] = []

    async def commit(member: Member) -> None:
        update.paused[member.engine.name] = unix()
        await _commit(driver, update, number, member)
        seconds = driver.pause_ended(update, member)
        if member.fenced is None:  # its process may have ended after its answer
            pauses.append(seconds)
            member.serve(update.version, driver.pool.lineage)

    committing = asyncio.ensure_future(driver.fencing(update, commit))
    await asyncio.wait((committing,), timeout=driver.pause_s * PATIENCE)
    if pauses and not committing.done():
        for member in update.members:
            # A late engine may swap at any moment, so no prompt may be cached there under its old version.
            member.waiting = member.waiting or member.engine.name in update.paused
        driver.pool.release()
    return await committing, pauses


async def _commit(driver: UpdateDriver, update: OpenUpdate, number: int, member: Member) -> None:
    commits = [CommitCommand(update.version, number)] * member.engine.tp
    async with driver.soon(member, f"to swap in version {update.version}"):  # each rank has reported full receipt
        await member.engine.client.command_receivers(commits, driver.timeout_s, update.version)


# ---------------------------------------------------------------- files


async def load_files(driver: UpdateDriver, update: OpenUpdate, folder: str) -> Failures:
    """Have all paused engines load a checkpoint (`asyncmoe.weights.sender.disk`); return those that failed, which are fenced because they
    may have part of it."""
    update.state = state.load(update.state)
    return await driver.fencing(update, lambda member: member.engine.client.load_files(folder, driver.timeout_s))
