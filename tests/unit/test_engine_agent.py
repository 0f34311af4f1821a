"""`asyncmoe engine` restarts its server when the server is lost, and only then."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from asyncmoe.engines import engine_agent, engine_stay
from asyncmoe.engines.engine_stay import ServerLost, stay
from asyncmoe.engines.membership import Membership
from asyncmoe.engines.pool import Pool
from asyncmoe.errors import AsyncmoeError, ConfigError, EngineError, ProtocolError, UserError, WaitTimeout
from asyncmoe.rpc import keys
from asyncmoe.rpc.messages import Done, EngineJoin, EngineJoined, EngineOrder, Reply, Request
from asyncmoe.rpc.server import Server
from tests.configs import demo
from tests.unit import virtual_time
from tests.unit.fake_engine import FakeEngine, FakeHandle

NAME = "engine.a"


class Process(FakeHandle):
    url = "http://127.0.0.1:1"

    async def wait_ready(self) -> None:
        pass

    async def stop(self) -> None:
        self.kill()


def joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lose: Callable[[Pool, Process], None], restarts: int = 2
) -> tuple[list[int], Pool, EngineError | None]:
    """Let an engine join, be lost twice as `lose` says, and join again each time; then the run finishes.

    Returns:
        The seeds that its server was started with, the controller's pool, and the error that the agent ended with.
    """
    settings = ["engines.join=true", f"run.dir={tmp_path}", "cluster.heartbeat_timeout_s=6", f"engines.restarts={restarts}"]
    config = demo(*settings)
    started: list[Process] = []
    seeds: list[int] = []

    def start(name: str, *_: Any, seed: int, **__: Any) -> Process:
        seeds.append(seed)
        started.append(Process(name))
        return started[-1]

    monkeypatch.setattr(engine_agent.backend, "start", start)
    monkeypatch.setattr(engine_agent, "BACKOFF_S", 0.05)
    monkeypatch.setattr("asyncmoe.engines.membership.connect", lambda name, url, key: FakeEngine(name))

    async def run() -> tuple[list[int], Pool, EngineError | None]:
        pool = Pool([], 8, 5.0, lambda *_: None)
        membership: Any = Membership(config, pool, lambda member: False, "", AsyncMock())
        async with Server(membership.handle) as server:
            keys.write(tmp_path, await server.start())
            serving = asyncio.create_task(server.serve())
            agent = asyncio.create_task(engine_agent._serve(config, NAME, 0, ()))
            for number in range(1, 4):  # it is lost twice
                while not agent.done() and not (len(started) == number and pool.present):
                    await asyncio.sleep(0.01)
                if agent.done():
                    break
                if number <= 2:
                    lose(pool, started[-1])
                else:
                    await membership.end(EngineOrder(finished=True))
            (ended,) = await asyncio.gather(agent, return_exceptions=True)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        assert ended is None or isinstance(ended, EngineError), ended
        return seeds, pool, ended

    return asyncio.run(asyncio.wait_for(run(), 30))


def test_a_server_that_is_fenced_or_dies_joins_again_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = iter([lambda pool, process: pool.fence(pool.present[0], "no token for 60 s"), lambda pool, process: process.kill()])
    seeds, pool, ended = joined(tmp_path, monkeypatch, lambda pool, process: next(ways)(pool, process))
    assert ended is None
    assert seeds == [seeds[0], seeds[0] + 1, seeds[0] + 2]
    assert [(member.engine.name, member.fenced, member.waiting) for member in pool.members] == [(NAME, None, True)]


def test_too_many_losses_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, pool, ended = joined(tmp_path, monkeypatch, lambda pool, process: process.kill(), restarts=1)
    assert len(seeds) == 2
    assert str(ended) == f"{NAME} died: killed; engines.restarts allows 1"
    assert pool.present == []


REFUSALS = [
    UserError("engine.a", got="a name already taken", expected="a unique name"),
    ConfigError("configuration of engine.a", got="a digest", expected="another"),
    EngineError("engine.a: the controller cannot reach it"),
    ProtocolError("malformed message"),
]


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize(("again", "dies"), [(False, False), (True, False), (False, True)])
def test_what_is_refused_is_lost_if_it_had_joined_or_died(tmp_path: Path, refusal: AsyncmoeError, again: bool, dies: bool) -> None:
    config = demo(f"run.dir={tmp_path}")
    server = Process(NAME)

    async def refuse(_: object) -> Done:
        if dies:
            server.kill()
        raise refusal

    async def run() -> None:
        async with Server(refuse) as here:
            rendezvous = await here.start()
            serving = asyncio.create_task(here.serve())
            request = EngineJoin(NAME, "http://127.0.0.1:1", "k" * 43, "h", 1, 1, config.digest, None)
            with pytest.raises(AsyncmoeError, match=re.escape(str(refusal))) as caught:
                await stay(config, server, rendezvous, request, asyncio.Event(), again=again)
            assert type(caught.value) is (ServerLost if again or dies else type(refusal))
            serving.cancel()

    asyncio.run(run())


class Hung:
    """Connections to successive controllers: the first accepts the engine, and then hangs."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, *_: object) -> Hung:
        return self

    async def ask(self, request: Request, timeout_s: float) -> tuple[Reply, tuple[()]]:
        self.asked.append(type(request).__name__)
        if self.asked == ["EngineJoin"]:
            return EngineJoined("the first"), ()
        await asyncio.sleep(timeout_s)
        raise WaitTimeout("the controller", "an answer", timeout_s)

    def close(self) -> None:
        pass


def leaves(monkeypatch: pytest.MonkeyPatch, stopped_at: float | None, orphaned_at: float = math.inf) -> tuple[float, str]:
    """Have an engine stay with a controller that hangs, by a clock that nobody waits for; return when it leaves, and why.

    Args:
        stopped_at: second at which it is told to stop; None: never.
        orphaned_at: second at which its supervisor is lost.
    """
    options = ["run.dir=unused", "cluster.heartbeat_timeout_s=9", "engines.orphan_s=40", "rollout.request_timeout_s=3000"]
    config = demo(*options)
    place: Any = SimpleNamespace(controller="the controller")

    async def found(*_: object) -> Any:
        return place

    async def body() -> tuple[float, str]:
        now, stop = asyncio.get_running_loop().time, asyncio.Event()
        monkeypatch.setattr(engine_stay, "AsyncClient", Hung())
        monkeypatch.setattr(engine_stay, "controller", found)
        monkeypatch.setattr(engine_stay.os, "getppid", lambda: engine_stay._PARENT + (now() >= orphaned_at))
        request = EngineJoin(NAME, "http://127.0.0.1:1", "k" * 43, "h", 1, 1, config.digest, None)
        if stopped_at is not None:
            asyncio.get_running_loop().call_at(stopped_at, stop.set)
        with pytest.raises(WaitTimeout) as caught:
            async with asyncio.timeout(1000.0):
                await stay(config, Process(NAME), place, request, stop, again=False)
        return now(), str(caught.value)

    return virtual_time.run(body())


def test_a_controller_that_hangs_is_found_again_and_again_but_renews_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat fails at second 12; the engine then asks to join until `engines.orphan_s` are over, 19 s at a time."""
    left_at, why = leaves(monkeypatch, None)
    assert 12 + 40 < left_at <= 12 + 40 + 19
    assert why.startswith("waited 40.0 s for the next controller")


@pytest.mark.parametrize("orphaned_at", [0.0, 5.0, 7.0])
def test_one_that_its_lost_supervisor_stopped_leaves_a_controller_that_hangs(monkeypatch: pytest.MonkeyPatch, orphaned_at: float) -> None:
    """It may hear that it is to stop before or after the supervisor has ended; from then on it waits `engines.orphan_s` at most."""
    left_at, why = leaves(monkeypatch, 5.0, orphaned_at)
    assert left_at == pytest.approx(max(5.0, orphaned_at) + 40, abs=1.0)
    assert why.startswith("waited 40.0 s for the controller: it has not let the engine leave")


def test_the_end_of_a_failed_run_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pool: Pool, process: Process) -> None:
        remote: Any = pool.present[0].engine
        remote.tell(EngineOrder(why="the run has failed: the trainer is gone"))

    seeds, _, ended = joined(tmp_path, monkeypatch, fail)
    assert len(seeds) == 1
    assert str(ended) == f"{NAME} was ended by the controller: the run has failed: the trainer is gone"
