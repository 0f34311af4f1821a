"""Rollout workers that are late, start again or have much to say, and engines that leave them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

from asyncmoe.rollout.workers.remote import RemoteWorker
from asyncmoe.rpc.worker_messages import EngineUse, WorkerBegin
from tests.unit.fake_engine import FakeHandle
from tests.unit.worker_fleet import Cluster, SlowEngine


def test_an_engine_that_leaves_is_asked_for_and_not_looked_up(tmp_path: Path) -> None:
    async def run() -> None:
        async with Cluster(tmp_path, workers=1, engines=2, seed=4) as cluster:
            await cluster.train(0)
            for handle in cluster.handles:
                handle.client.hangs = True
            lent, gates = cluster.lent[1].worker, cluster.fleet._gates
            while not all(member.in_flight for member in lent.pool.members):
                await asyncio.sleep(0.01)
            leaves = cluster.pool.members[0]
            leaves.elsewhere, leaves.leaving = 0, True  # as the news before said
            gates.tell()
            assert await gates.late() == 0
            (there,) = [member for member in lent.pool.members if member.engine.name == leaves.engine.name]
            assert leaves.elsewhere == there.in_flight > 0
            assert there.leaving
            for handle in cluster.handles:
                handle.client.hangs = False

    asyncio.run(run())


def test_every_worker_uses_every_engine_with_its_share_of_the_requests(tmp_path: Path) -> None:
    async def run() -> None:
        async with Cluster(tmp_path, workers=3, engines=2, seed=8, staleness=40) as cluster:
            for handle in cluster.handles:
                handle.client.hangs = True
            shares = [cluster.config.rollout.share(number) for number in (1, 2, 3)]
            assert shares == [22, 21, 21]
            pools = [cluster.lent[number].worker.pool for number in (1, 2, 3)]
            while [sum(member.in_flight for member in pool.members) for pool in pools] != shares:
                await asyncio.sleep(0.01)
            assert all(member.in_flight for pool in pools for member in pool.members)
            while sum(member.elsewhere for member in cluster.pool.members) != 64 or cluster.fleet.requests <= 64:
                await asyncio.sleep(0.01)  # those that wait are requests too
            await cluster.lose(3)
            await cluster.lost(3)
            assert sum(member.elsewhere for member in cluster.pool.members) == 43
            for handle in cluster.handles:
                handle.client.hangs = False

    asyncio.run(run())


def test_an_adapter_is_in_use_until_all_workers_know_the_next_one_and_their_requests_have_ended(tmp_path: Path) -> None:
    async def run() -> None:
        async with Cluster(tmp_path, workers=2, engines=1, seed=8, staleness=40) as cluster:
            (member,), (handle,) = cluster.pool.members, cluster.handles
            member.adapter = "v1"
            cluster.fleet._gates.tell()
            while not all(any(one.users["v1"] for one in lent.worker.pool.members) for lent in cluster.lent.values()):
                await asyncio.sleep(0.001)
            handle.client.hangs, member.adapter = True, "v2"
            assert await cluster.pool._in_use(member, "v1")
            handle.client.hangs = False
            while await cluster.pool._in_use(member, "v1"):
                await asyncio.sleep(0.01)
            with mock.patch.object(cluster.fleet._gates, "late", mock.AsyncMock(return_value=1)):
                assert await cluster.pool._in_use(member, "v1"), "a worker that has not heard of the next one may still ask for it"

    asyncio.run(run())


def test_a_worker_that_comes_again_hears_what_is_under_way_now(tmp_path: Path) -> None:
    told: list[WorkerBegin] = []
    begin = RemoteWorker.begin

    async def noted(self: RemoteWorker, first: WorkerBegin) -> Any:
        told.append(first)
        return await begin(self, first)

    async def run() -> None:
        with mock.patch.object(RemoteWorker, "begin", noted):
            async with Cluster(tmp_path, workers=2, engines=2, seed=5) as cluster:
                for step in range(3):
                    await cluster.train(step)
                for handle in cluster.handles:
                    handle.client.hangs = True
                while not cluster.fleet._workers[2].running:
                    await asyncio.sleep(0.01)
                await cluster.lose(1)
                await cluster.lost(1)
                others = {place.group for _, place in cluster.lent[2].worker._running}
                await cluster.start(1)
                for handle in cluster.handles:
                    handle.client.hangs = False
                trained = {one.group for made in cluster.trained.values() for one in made}
                assert others <= set(told[-1].under_way)
                assert not trained & set(told[-1].under_way)

    asyncio.run(run())


def test_what_is_said_of_an_engine_before_it_started_again_does_not_end_it(tmp_path: Path) -> None:
    """It has its name and its address again."""

    async def run() -> None:
        async with Cluster(tmp_path, workers=1, engines=1, seed=6) as cluster:
            await cluster.train(0)
            before, there = cluster.pool.members[0], cluster.fleet._workers[1]
            cluster.pool.returns = lambda _: True
            cluster.pool.fence(before, "it has died")
            handle = FakeHandle(before.engine.name)
            handle.client = SlowEngine(handle.name, cluster.draw)
            handle.client.version = 1
            cluster.handles[:] = [handle]
            cluster.pool.remove(before)
            again = cluster.pool.join(handle)
            again.serve(1, 0)
            while there.engines is None or [one.serial for one in there.engines.engines] != [again.serial]:
                await asyncio.sleep(0.01)
            cluster.fleet._gates.note(there, [EngineUse(before.serial, 9, None, "it does not answer")])
            assert (again.fenced, again.elsewhere < 9) == (None, True)
            for step in range(1, 3):
                await cluster.train(step)
            assert again.fenced is None
            cluster.fleet._gates.note(there, [EngineUse(again.serial, 0, None, "it does not answer")])
            assert again.fenced == "it does not answer"

    asyncio.run(run())
