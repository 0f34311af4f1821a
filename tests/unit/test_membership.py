"""Engines that join, stay and leave: the controller's replies; real ones are in tests/system/test_nodes.py and test_slurm.py."""

from __future__ import annotations

import asyncio
import functools
import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from asyncmoe.config import Config
from asyncmoe.engines import membership, standstill
from asyncmoe.engines.member import Member
from asyncmoe.engines.membership import Membership
from asyncmoe.engines.pool import Pool
from asyncmoe.errors import AsyncmoeError, ConfigError, EngineError, ProtocolError, UserError, WaitTimeout
from asyncmoe.rpc import messages, nccl_settings
from asyncmoe.rpc.node_messages import EngineNode, EngineNodeEnd, EngineNodes
from asyncmoe.rpc.peers import Facts
from asyncmoe.weights.coordinator.coordinator import WeightUpdateCoordinator
from tests.configs import demo
from tests.unit.asynchronous import asynchronous
from tests.unit.fake_engine import FakeEngine, coordinator_of


class Rig:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.pool = Pool([], 8, 5.0, lambda *_: None)
        self.published: list[int] = []

    @functools.cached_property
    def coordinator(self) -> WeightUpdateCoordinator:
        """Made in the test's loop."""
        return coordinator_of(self.pool, self.published)

    @functools.cached_property
    def membership(self) -> Membership:
        return Membership(self.config, self.pool, self.coordinator.updating, "", AsyncMock(return_value="it served another"))

    async def join(self, name: str, **changed: Any) -> Member:
        values = {"url": "http://10.0.0.1:1", "key": "k", "host": "h", "tp": 1, "ep": 1, "config_digest": self.config.digest}
        await self.membership.handle(messages.EngineJoin(name, **{**values, **changed}))
        return self.pool.members[-1]

    def node(self, number: int, start: str, met: str = "", wait_s: float = 0.0) -> EngineNode:
        return EngineNode("a", number, 2, start, f"h{number}", f"n{number}", "tcp://n0:1", met, wait_s, self.config.digest)

    async def meet(self, starts: tuple[str, str]) -> Member:
        """Have the two nodes of engine a come, and the engine join."""
        for number, start in enumerate(starts):
            await self.membership.handle(self.node(number, start))
        return await self.join("a", tp=2, nodes=2, met="tcp://n0:1", host="h0+h1")

    async def roster(self) -> messages.Engines:
        return await self.coordinator.handle(messages.EnginesAsk(1.0))  # type: ignore[return-value]

    async def publish(self, version: int) -> messages.Committed:
        await self.roster()
        await self.coordinator.handle(messages.WeightsStage(version))
        reply = await self.coordinator.handle(messages.WeightsCommit(version, update=1))
        assert isinstance(reply, messages.Committed)
        return reply


@pytest.fixture
def it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(membership, "connect", lambda name, url, key: FakeEngine(name))
    limits = "cluster.heartbeat_timeout_s=30", "rollout.request_timeout_s=5"
    return Rig(demo("engines.join=true", "engines.count=2", f"run.dir={tmp_path}", *limits))


@asynchronous
async def test_one_that_joins_serves_from_its_first_version_on(it: Rig) -> None:
    await it.join("a")
    await it.publish(1)
    late = await it.join("b")
    assert [m.engine.name for m in it.pool.serving] == ["a"]
    assert late.waiting
    await it.publish(2)
    assert [(m.engine.name, m.version) for m in it.pool.serving] == [("a", 2), ("b", 2)]
    assert it.published == [1, 2]


@asynchronous
async def test_one_that_leaves_waits_until_its_rollout_worker_knows_that_it_does(it: Rig) -> None:
    member = await it.join("a")
    await it.join("b")
    await it.publish(1)
    it.pool.elsewhere = workers = Mock(late=AsyncMock(return_value=1))  # a worker that has not yet received its tasks
    leaving = asyncio.create_task(it.membership.handle(messages.EngineLeave("a")))
    while not workers.tell.called:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.25)
    assert member in it.pool.members
    member.elsewhere, workers.late.return_value = 1, 0  # it says so, and what it has there
    await asyncio.sleep(0.25)
    assert member in it.pool.members
    member.elsewhere = 0
    await asyncio.wait_for(leaving, 2)
    assert member not in it.pool.members


@asynchronous
async def test_one_that_falls_silent_is_dead(it: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await it.join("a")
    silent, begin = await it.join("b"), time.monotonic()
    for seconds in range(45):
        monkeypatch.setattr(standstill.time, "monotonic", lambda now=begin + seconds: now)
        await it.membership.handle(messages.EngineAlive("a", 0.0))
        it.pool.fence_dead()
        assert silent.fenced is None or seconds >= 30
    assert "no heartbeat" in silent.fenced
    assert it.pool.members[0].fenced is None
    order = await it.membership.handle(messages.EngineAlive("b", 5.0))  # it was only slow
    assert order.why


@asynchronous
async def test_a_controller_that_stood_still_takes_nobody_for_dead(it: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    member = await it.join("a")
    it.pool.fence_dead()
    begin = time.monotonic()
    monkeypatch.setattr(standstill.time, "monotonic", lambda: begin + 100.0)
    it.pool.fence_dead()
    assert member.fenced is None, "its heartbeats wait to be read"
    for seconds in range(101, 132):
        monkeypatch.setattr(standstill.time, "monotonic", lambda now=begin + seconds: now)
        it.pool.fence_dead()
    assert member.fenced is not None, "and there were none"


@asynchronous
async def test_one_that_says_it_died_is_fenced_with_its_reason_and_may_come_again(it: Rig) -> None:
    await it.join("a")
    await it.join("b")
    await it.membership.handle(messages.EngineLeave("b", "out of memory"))
    assert it.pool.members[1].fenced == "out of memory"
    again = await it.join("b")
    assert [m.engine.name for m in it.pool.members] == ["a", "b"]
    assert again.fenced is None


@asynchronous
@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"config_digest": "0" * 64}, ConfigError, "configuration of b: got digest 000000000000"),
        ({"facts": Facts("n7", "engine.b", {"msgspec": "0.1"}, time.time())}, UserError, "engine.b on n7: got msgspec 0.1, expected"),
        ({"facts": Facts("n7", "engine.b", {}, time.time() - 99, nccl_settings.shared())}, UserError, "n7: got a clock \\d.* s behind"),
        ({"facts": Facts("n7", "engine.b", {}, time.time())}, UserError, "engine.b on n7: got NCCL_CUMEM_ENABLE unset, expected"),
        ({"name": "a"}, UserError, "engine a: got a name already taken"),
    ],
)
async def test_who_may_not_join(it: Rig, changed: dict[str, Any], error: type[AsyncmoeError], words: str) -> None:
    await it.join("a")
    name = changed.pop("name", "b")
    with pytest.raises(error, match=words):
        await it.join(name, **changed)
    assert len(it.pool.members) == 1


@asynchronous
@pytest.mark.parametrize("fenced", [True, False])
async def test_no_moment_is_without_the_only_engine_that_comes_again(it: Rig, monkeypatch: pytest.MonkeyPatch, fenced: bool) -> None:
    """Else the run would end. Of one whose keeper is lost nobody may have noticed yet that it does not answer."""
    old = await it.join("a")
    if fenced:
        it.pool.fence(old, "no token for 60 s")
    asked: list[bool] = []

    async def ready(client: FakeEngine) -> bool:
        asked.append(bool(it.pool.members))
        return len(asked) > (not fenced)

    monkeypatch.setattr(FakeEngine, "ready", ready)
    new = await it.join("a")
    assert all(asked)
    assert it.pool.members == [new] != [old]


@asynchronous
async def test_strangers_and_the_missing_are_named(it: Rig) -> None:
    with pytest.raises(ProtocolError, match="b: no engine of that name"):
        await it.membership.handle(messages.EngineAlive("b", 1.0))
    await it.join("a")
    with pytest.raises(WaitTimeout, match=r"for engines: 1 of 2 have not joined; joined: a"):
        await it.membership.wait_joined(2, 0.2)
    await it.join("c")
    await it.membership.wait_joined(2, 0.2)


@asynchronous
@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("first", [0, 1])
async def test_all_nodes_may_be_asked_to_stop_at_once(it: Rig, first: int, in_flight: int) -> None:
    await it.join("b")
    member = await it.meet(("0", "1"))
    await it.publish(1)
    member.in_flight = in_flight
    ends = (messages.EngineLeave("a"), EngineNodeEnd("a", 1, "1"))
    leaving = []
    for end in (ends[first], ends[1 - first]):
        leaving.append(asyncio.create_task(it.membership.handle(end)))
        await asyncio.sleep(0.3)
    assert [task.done() for task in leaving] == [not in_flight] * 2
    assert [m.engine.name for m in it.pool.serving] == ["b"]
    member.in_flight = 0
    assert set(await asyncio.gather(*leaving)) == {messages.Done(), EngineNodes(finished=True)}
    assert [e.name for e in (await it.roster()).engines] == [m.engine.name for m in it.pool.members] == ["b"]
    assert await it.membership.handle(messages.EngineAlive("a", 0.0)) == messages.EngineOrder(finished=True)


@asynchronous
async def test_one_that_comes_again_while_it_still_leaves_ends_nothing(it: Rig) -> None:
    member = await it.join("a")
    member.in_flight = 1
    leaving = asyncio.create_task(it.membership.handle(messages.EngineLeave("a")))
    await asyncio.sleep(0.05)
    with pytest.raises(EngineError, match="it served another"):
        await it.join("a", served="c")
    await leaving


@asynchronous
async def test_a_node_of_an_earlier_start_ends_nobody(it: Rig) -> None:
    member = await it.meet(("0", "1"))
    assert await it.membership.handle(EngineNodeEnd("a", 1, "earlier")) == EngineNodes(finished=True)
    assert (it.pool.members, member.leaving, member.fenced) == ([member], False, None)
