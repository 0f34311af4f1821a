"""Rollout workers that are late, restart or send large messages, and engines that leave."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest

from asyncmoe.errors import ProtocolError
from asyncmoe.log.log import Place
from asyncmoe.rollout.workers import service
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.codec import decode_reply, encode
from asyncmoe.rpc.worker_messages import EngineUse, PackedGroup, WorkerPacked
from tests.unit.asynchronous import asynchronous, until
from tests.unit.fake_engine import FakeHandle
from tests.unit.worker_fleet import Cluster, SlowEngine, clustered


@asynchronous
async def test_an_episode_too_large_to_be_read_is_trained_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_MOST_SAMPLED", 8)
    left: list[object] = []
    async with Cluster(tmp_path, workers=1, engines=1, seed=2) as cluster:
        cluster.fleet.sampled = lambda place, made: left.append(made)
        for step in range(2):
            await cluster.train(step)
    assert not left


@pytest.mark.thorough
@clustered(workers=2, engines=2, seed=3)
async def test_a_worker_that_stands_still_holds_up_the_others_gates_only_at_first(cluster: Cluster) -> None:
    await cluster.train(0)
    still, goes = (cluster.fleet._workers[number] for number in (1, 2))
    gates, stands = cluster.fleet._gates, asyncio.Event()
    gates._answer_s = 2.0

    async def stand(*_: object) -> None:
        await stands.wait()

    with mock.patch.object(cluster.lent[1].worker._engines, "use", stand):
        cluster.pool.hold()
        assert await cluster.pool.held() > 0, "it may have requests in flight, which an update may not meet"
        assert not still.gone
        assert not goes.engines.open
        assert not cluster.lent[2].worker.pool._gate._open.is_set()
        cluster.pool.release()
        assert "WorkerEngines" in await cluster.lost(1)
        stands.set()
    await cluster.lose(1)
    await cluster.start(1)  # which has what the next batch may need
    await cluster.train(1)


@clustered(workers=1, engines=2, seed=4)
async def test_an_engine_that_leaves_is_asked_for_and_not_looked_up(cluster: Cluster) -> None:
    await cluster.train(0)
    cluster.hang(True)
    lent, gates = cluster.lent[1].worker, cluster.fleet._gates
    await until(lambda: all(member.in_flight for member in lent.pool.members))
    leaves = cluster.pool.members[0]
    leaves.elsewhere, leaves.leaving = 0, True  # as the news before said
    gates.tell()
    assert await gates.late() == 0
    (there,) = [member for member in lent.pool.members if member.engine.name == leaves.engine.name]
    assert leaves.elsewhere == there.in_flight > 0
    assert there.leaving
    cluster.hang(False)


@clustered(workers=3, engines=2, seed=8, staleness=40)
async def test_every_worker_uses_every_engine_with_its_share_of_the_requests(cluster: Cluster) -> None:
    cluster.hang(True)
    shares = [cluster.config.worker_share(number) for number in (1, 2, 3)]
    assert shares == [22, 21, 21]
    pools = [cluster.lent[number].worker.pool for number in (1, 2, 3)]
    await until(lambda: [sum(member.in_flight for member in pool.members) for pool in pools] == shares)
    assert all(member.in_flight for pool in pools for member in pool.members)
    await until(lambda: sum(member.elsewhere for member in cluster.pool.members) == 64)
    await cluster.lose(3)
    await cluster.lost(3)
    assert sum(member.elsewhere for member in cluster.pool.members) == 43
    cluster.hang(False)


@clustered(workers=2, engines=2, seed=5)
async def test_a_worker_that_comes_again_hears_what_is_under_way_now(cluster: Cluster) -> None:
    for step in range(3):
        await cluster.train(step)
    cluster.hang(True)
    await until(lambda: cluster.fleet._workers[2].running)
    others = {place.group for place in cluster.lent[2].worker._worker._running}
    told = set(cluster.run_log.for_workers().under_way)
    assert others <= told
    assert not told & {one.group for made in cluster.trained.values() for one in made}
    cluster.hang(False)


@clustered(workers=1, engines=1, seed=6)
async def test_what_is_said_of_an_engine_before_it_started_again_does_not_end_it(cluster: Cluster) -> None:
    """It has its name and its address again."""

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
    await until(lambda: there.engines is not None and [one.serial for one in there.engines.engines] == [again.serial])
    cluster.fleet._gates.note(there, [EngineUse(before.serial, 9, None, "it does not answer")])
    assert (again.fenced, again.elsewhere < 9) == (None, True)
    for step in range(1, 3):
        await cluster.train(step)
    assert again.fenced is None
    cluster.fleet._gates.note(there, [EngineUse(again.serial, 0, None, "it does not answer")])
    assert again.fenced == "it does not answer"


@clustered(workers=1, engines=1, seed=7)
async def test_a_rank_lets_go_of_a_worker_that_was_replaced(cluster: Cluster) -> None:
    with closing(Client(cluster._rendezvous, "trainer.0")) as client:
        holder = cluster.fleet._workers[1].joined.rendezvous
        before = client.beside(holder, "rollout worker 1")
        assert client.beside(holder, "rollout worker 1") is before
        await cluster.lose(1)
        await cluster.lost(1)
        await cluster.start(1)
        assert client.beside(cluster.fleet._workers[1].joined.rendezvous, "rollout worker 1") is not before
        if not (closed := before._connection.socket.closed):
            before.close()  # or the end of its context waits for it
        assert closed


def test_a_place_that_cannot_be_is_no_reply() -> None:
    fine, wrong = (WorkerPacked((PackedGroup((), 0, Place(1, offset)),)) for offset in (3, -3))
    assert decode_reply(encode(fine)) == fine
    with pytest.raises(ProtocolError, match=r"groups\[0\]\[2\]\[1\]"):
        decode_reply(encode(wrong))
