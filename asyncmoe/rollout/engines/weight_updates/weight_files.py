"""A whole version in a directory, which paused engines load themselves (`asyncmoe.trainer.weight_sync.disk`)."""

from __future__ import annotations

from asyncmoe.rollout.engines.member import Member
from asyncmoe.rollout.engines.weight_updates import state
from asyncmoe.rollout.engines.weight_updates.asking import Failures
from asyncmoe.rollout.engines.weight_updates.driver import OpenUpdate, UpdateDriver


async def load(driver: UpdateDriver, update: OpenUpdate, folder: str) -> Failures:
    """Have all paused engines load a checkpoint; return those that failed, which are fenced: they may hold part of it."""
    update.state = state.load(update.state)

    async def load_one(member: Member) -> None:
        await member.engine.client.load_files(folder, driver.timeout_s)

    return await driver.fencing(update, load_one)
