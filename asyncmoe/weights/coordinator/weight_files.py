"""A whole version in a directory, which paused engines load themselves (`asyncmoe.weights.sender.disk`)."""

from __future__ import annotations

from asyncmoe.engines.member import Member
from asyncmoe.weights.coordinator import state
from asyncmoe.weights.coordinator.asking import Failures
from asyncmoe.weights.coordinator.driver import OpenUpdate, UpdateDriver


async def load(driver: UpdateDriver, update: OpenUpdate, folder: str) -> Failures:
    """Have all paused engines load a checkpoint; return those that failed, which are fenced: they may hold part of it."""
    update.state = state.load(update.state)

    async def load_one(member: Member) -> None:
        await member.engine.client.load_files(folder, driver.timeout_s)

    return await driver.fencing(update, load_one)
