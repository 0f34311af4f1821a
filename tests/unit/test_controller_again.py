"""A controller that is lost while the trainer goes on: the ranks meet its successor, at a real log and engines that are not SGLang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asyncmoe.config import Config
from asyncmoe.errors import ProtocolError
from asyncmoe.rpc import keys
from asyncmoe.rpc.client import Client, ConnectionGone
from asyncmoe.rpc.messages import Commit, Done, Fetch, Hello, Lease, Leased, Reply, Request, WeightsLoaded, Welcome
from asyncmoe.rpc.returning import ReturningClient, Standing, Standings
from tests.unit.test_trainer_again import RANKS, Running, StandIn, config_of, controller, in_loop, model
from tests.unit.test_wire import served

__all__ = ["model"]
WAIT_S = 20.0
LOADED = WeightsLoaded(({"weight": "0"},), first=True)
"""Engines have loaded what the trainer has: they may sample."""


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[Running]:
    """A controller that can be found, from its start to its loss."""
    async with controller(config) as running:
        keys.write(config.run.dir, running.rendezvous)
        yield running


def ranks(config: Config, running: Running, wait_s: float = WAIT_S) -> list[Client]:
    """Clients of the trainer's ranks, which outlive the controller."""
    return [
        ReturningClient(running.rendezvous, f"trainer.{rank}", 0, config.run.dir, wait_s, Standings(), True, lambda: None)
        for rank in range(RANKS)
    ]


def close(clients: Sequence[Client]) -> None:
    for client in clients:
        client.close()


def trained(trainer: StandIn) -> list[str]:
    return [item.key for leased in trainer.batches.values() for item in leased.items]


def groups(keys: Sequence[str]) -> set[int]:
    return {int(key[1:].split(".")[0]) for key in keys}


def test_ranks_go_on_with_the_lease_they_have_and_nothing_is_trained_twice(model: Path, tmp_path: Path) -> None:
    requeue = {"staleness": {"max_staleness": 1, "rule": "requeue"}}  # a busy machine may let a group grow too old: not lost either
    config = config_of(model, tmp_path / "run", run={"dir": str(tmp_path / "run"), "steps": 60}, queue=requeue)
    first = set(range(12))

    async def body() -> None:
        async with serving(config) as running:
            trainer = StandIn(config, ranks(config, running))
            await trainer.hello(0)
            await trainer.ask(LOADED)
            for _ in range(2):
                await trainer.train()
                await trainer.publish()
            under_way = await trainer.lease()
        waiting = asyncio.create_task(trainer.ask(Fetch(2, tuple(item.key for item in under_way.items)), rank=1))
        async with serving(config):
            await waiting
            await asyncio.gather(*(trainer.ask(Commit(2), rank) for rank in range(RANKS)))
            trainer.batches[2], trainer.step = under_way, 3
            await trainer.publish()
            while trainer.step < 6 or (trainer.step < config.run.steps and not first <= groups(trained(trainer))):
                leased = await trainer.train()
                assert (leased.lineage, leased.replayed) == (0, False)
                await trainer.publish()
            await trainer.goodbye(finished=False)
        close(trainer.ranks)
        assert len(trained(trainer)) == len(set(trained(trainer))) == trainer.step * config.rollout.batch
        # A group that was under way when the controller was lost is sampled again, and may end after later ones.
        assert first <= groups(trained(trainer)), "no group was begun anew under another number"

    in_loop(body())


@pytest.mark.parametrize("phase", ["rl", "warmup"])
def test_a_rank_that_missed_the_answer_to_its_commit_and_one_that_did_not_agree(model: Path, tmp_path: Path, phase: str) -> None:
    warm = {"warmup": {"steps": 4, "batch": 4}} if phase == "warmup" else {}
    config = config_of(model, tmp_path / "run", **warm)

    async def body() -> None:
        async with serving(config) as running:
            trainer = StandIn(config, ranks(config, running))
            await trainer.hello(0)
            await trainer.ask(LOADED)
            for rank in range(RANKS):
                first = await trainer.ask(Lease(0, phase, 4, 0, 20.0), rank)  # type: ignore[arg-type]
            await trainer.ask(Commit(0), 0)
        missing = asyncio.create_task(trainer.ask(Commit(0), 1))
        async with serving(config) as running:
            if phase == "rl":
                trainer.step = 1
                await trainer.publish()
            await missing
            asked = Lease(1, phase, 4, 1, 20.0)  # type: ignore[arg-type]
            second = await asyncio.gather(*(trainer.ask(asked, rank) for rank in range(RANKS)))
            assert isinstance(first, Leased)
            assert isinstance(second[0], Leased)
            assert second[0] == second[1]
            assert not {item.key for item in first.items} & {item.key for item in second[0].items}
            with pytest.raises(ProtocolError, match="has taken 3 steps, the controller counts 1"):
                await trainer.ask(Hello(0, RANKS, config.digest, 3, goes_on=True))
        close(trainer.ranks)

    in_loop(body())


def test_a_rank_waits_for_the_next_controller_for_a_bounded_time(model: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path / "run")

    async def body() -> None:
        async with serving(config) as running:
            trainer = StandIn(config, ranks(config, running, wait_s=1.0))
            await trainer.hello(0)
        with pytest.raises(ConnectionGone, match=r"waited \d\.\d s for the controller: trainer.0: .*nobody with its keys answers"):
            await trainer.ask(Lease(0, "rl", 4, 0, 1.0))
        close(trainer.ranks)

    in_loop(body())


@pytest.mark.parametrize("committed", [True, False])
def test_another_rank_may_commit_the_step_while_this_one_returns(tmp_path: Path, committed: bool) -> None:
    asked: list[str] = []

    async def answer(request: Request) -> Reply:
        asked.append(type(request).__name__)
        if isinstance(request, Hello):
            return Welcome("run", trained=3 if committed and asked.count("Hello") > 1 else 2)
        if isinstance(request, Lease):
            raise ProtocolError("lease of step 2: refused")
        return Done()

    with served(answer) as gone, served(answer) as successor:
        standings = Standings()
        standings.now = Standing(Hello(1, 2, "digest", 2, goes_on=True), Lease(2, "rl", 1, 2, 1.0), ("a",))
        client = ReturningClient(gone.rendezvous, "trainer.1", 0, tmp_path, 20.0, standings, True, lambda: None)
        with client:
            keys.write(tmp_path, successor.rendezvous)
            if committed:
                client._meet(time.monotonic() + 20.0)
                assert asked == ["Hello", "Lease", "Hello"]
            else:
                with pytest.raises(ProtocolError, match="refused"):
                    client._meet(time.monotonic() + 20.0)
