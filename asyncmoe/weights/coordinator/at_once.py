"""A version that waits in every engine, swapped in by one call to each: no engine stands still for a round trip to this process."""

from __future__ import annotations

import asyncio

from asyncmoe.engines.member import Member
from asyncmoe.errors import WeightSyncError
from asyncmoe.platform.sglang.receiver_command import CommitCommand
from asyncmoe.telemetry.clock import unix
from asyncmoe.weights.coordinator import state
from asyncmoe.weights.coordinator.asking import Failures
from asyncmoe.weights.coordinator.driver import PATIENCE, OpenUpdate, UpdateDriver


async def swap(driver: UpdateDriver, update: OpenUpdate, number: int) -> tuple[Failures, list[float]]:
    """Close the gate, and have each engine swap in the weights that its ranks received, between two forward passes.

    If an engine takes longer than `PATIENCE` of `pause_s`, it may hang: requests go to those that have the version, until the late one has
    it too or is fenced.

    Args:
        number: the number under which all receivers reported the version as received.

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
        async with driver.soon(member, f"swap in version {update.version}"):
            commits = [CommitCommand(update.version, number)] * member.engine.tp
            await member.engine.client.command_receivers(commits, driver.timeout_s, update.version)
        seconds = driver.pause_ended(update, member)
        if member.fenced is None:  # its process may have ended since it answered
            pauses.append(seconds)
            member.serve(update.version, driver.pool.lineage)

    committing = asyncio.ensure_future(driver.fencing(update, commit))
    await asyncio.wait((committing,), timeout=driver.pause_s * PATIENCE)
    if pauses and not committing.done():
        for member in update.members:
            # A late engine may change at any moment, so no prompt may be cached there under the version that it had.
            member.waiting = member.waiting or member.engine.name in update.paused
        driver.pool.release()
    return await committing, pauses
