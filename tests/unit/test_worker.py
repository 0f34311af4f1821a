"""A worker in one process: what it keeps of an episode, and until when."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest import mock

import pytest

from asyncmoe.errors import ProtocolError
from asyncmoe.log import turns
from asyncmoe.log.turns import Turns
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.run_log import WorkerLog
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.workers.worker import Worker
from asyncmoe.trajectory import Trajectory
from tests.unit.log_lives import Home
from tests.unit.test_producer import Numbers, respond

PLACES = [EpisodeId(3, member, 0) for member in range(2)]


def test_an_episode_that_was_forgotten_is_ended_and_not_packed() -> None:
    async def body() -> None:
        goes_on, ended = asyncio.Event(), list[EpisodeId]()

        async def play(prompt: Prompt, place: EpisodeId) -> tuple[Trajectory, ...]:
            try:
                await goes_on.wait()
            except asyncio.CancelledError:  # and goes on, as a user's code may
                ended.append(place)
            return (respond(prompt, place),)

        worker = Worker(play, 2)
        late = [asyncio.create_task(worker.episode(Numbers().prompt(3), place)) for place in PLACES]
        await asyncio.sleep(0)
        worker.forget(PLACES[:1])
        again = asyncio.create_task(worker.episode(Numbers().prompt(3), PLACES[0]))  # the next attempt may have one of the same name
        await asyncio.sleep(0)
        worker.forget(PLACES[:1])
        goes_on.set()
        await asyncio.gather(*late, again)
        assert ended == [PLACES[0]] * 2
        with pytest.raises(ProtocolError, match=r"got g3\.e0\.a0\.t0, expected episodes that have ended here"):
            await worker.pack(PLACES, 1)

    asyncio.run(body())


def test_a_payload_that_no_record_names_stays_as_long_as_its_group_is_held(tmp_path: Path) -> None:
    async def body() -> None:
        async def play(prompt: Prompt, place: EpisodeId) -> tuple[Trajectory, ...]:
            return (respond(prompt, place),)

        kept = WorkerLog(Home().log(tmp_path, "1"), Turns(Home().log(tmp_path, turns.writer(1)), {}))
        worker = Worker(play, 2, kept=kept)
        for place in PLACES:
            await worker.episode(Numbers().prompt(3), place)
        group = await worker.pack(PLACES, 1)
        assert group.place is not None
        with mock.patch.object(kept.payloads, "forget") as forget:
            await worker.retain({})
            worker.over([group])
            await worker.retain({})
            await worker.retain({1: group.place.position})
        at = group.place.position
        assert [call.args for call in forget.call_args_list] == [(at,), (kept.payloads.end,), (at,)]
        assert at < kept.payloads.end
        kept.close()

    asyncio.run(body())
