"""Rollout workers that only answer, and the trainer's rank that takes what they say they have; a process for `benchmarks.ledger_case`.

It writes where each worker serves, a line each, and reads where the controller does. It ends when its input closes.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack

import msgspec

from asyncmoe.errors import InvariantBroken
from asyncmoe.log.log import Place
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.item import Item
from asyncmoe.rpc.messages import Commit, Done, Lease, Leased, Reply, Request
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.rpc.server import Server
from asyncmoe.rpc.worker_messages import (
    EngineUse,
    Figures,
    Made,
    PackedGroup,
    WorkerAsk,
    WorkerBegin,
    WorkerBegun,
    WorkerEngines,
    WorkerNews,
    WorkerPack,
    WorkerPacked,
    WorkerRan,
    WorkerRun,
)

TOKENS = 4096
_WAIT_S = 60.0


class AnsweringWorker:
    """A worker whose episodes end as soon as they start."""

    def __init__(self, number: int) -> None:
        self._number, self._offset, self._uses = number, 64, tuple[EngineUse, ...]()

    async def answer(self, request: Request) -> Reply:
        """Answer the controller."""
        match request:
            case WorkerBegin():
                return WorkerBegun(())
            case WorkerEngines():
                self._uses = tuple(EngineUse(one.serial, 0, 0.0) for one in request.engines)
                return self._news()
            case WorkerRun():
                return WorkerRan((Made(0, float((request.episode.group + request.episode.episode) % 2)),))
            case WorkerPack():
                return self._packed(request)
            case WorkerAsk():
                await asyncio.sleep(0.25)
                return self._news()
        return Done()

    def _news(self) -> WorkerNews:
        return WorkerNews(self._uses, (), 0, {}, Figures())

    def _packed(self, request: WorkerPack) -> WorkerPacked:
        version = max(request.newest - 1, 0)
        items = tuple(self._item(EpisodeId(one.group, one.episode, one.attempt), version) for one in request.episodes)
        place = Place(self._number, self._offset)
        self._offset += TOKENS * len(items)
        return WorkerPacked((PackedGroup(items, 0, place),))

    def _item(self, place: EpisodeId, version: int) -> Item:
        reward = float((place.group + place.episode) % 2)
        return Item(place.key(), place.group, place.episode, 0, TOKENS, TOKENS - 128, reward, version, version)


def over_tcp(rendezvous: Rendezvous) -> Rendezvous:
    """Return a rendezvous without the Unix socket that is faster on one machine."""
    return msgspec.structs.replace(rendezvous, local_dir="", local_secret="")


def train(controller: Rendezvous, steps: int, batch: int) -> None:
    """Lease and commit. Raises InvariantBroken if a batch is not whole."""
    with Client(controller, "trainer.0") as client:
        for step in range(steps):
            leased = client.ask(Lease(step, "rl", batch, step, _WAIT_S), 2 * _WAIT_S)[0]
            if not isinstance(leased, Leased) or len(leased.items) != batch:
                raise InvariantBroken(f"step {step}: got {leased}, expected {batch} trajectories")
            client.ask(Commit(step), _WAIT_S)


async def main(workers: int, steps: int, batch: int) -> None:
    """Serve and train."""
    async with AsyncExitStack() as held:
        tasks = []
        for number in range(1, workers + 1):
            server = await held.enter_async_context(Server(AnsweringWorker(number).answer))
            print(msgspec.json.encode(over_tcp(await server.start())).decode(), flush=True)
            tasks.append(asyncio.create_task(server.serve()))
        line = await asyncio.to_thread(sys.stdin.readline)
        await asyncio.to_thread(train, msgspec.json.decode(line, type=Rendezvous), steps, batch)
        print("trained", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
