"""Worker: a run trains to the same bits whether batches are fetched ahead or not, and whether it was stopped after two steps or not.
`ahead.py RESULT PATH LAYOUT...`"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from asyncmoe import models
from asyncmoe.config import Config, parse
from asyncmoe.config.lora import LoraSection
from asyncmoe.models import load_hf_config
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.messages import Commit, FindWorker
from asyncmoe.rpc.server import Server
from asyncmoe.trainer import loop
from asyncmoe.trainer.batch_trainer import Learner
from asyncmoe.trainer.data import batch_client
from asyncmoe.trainer.model import checkpoint, gpt, mesh, optimizer
from asyncmoe.trainer.objective import NO_PLUGINS
from asyncmoe.trainer.samples import TrainerSamples
from asyncmoe.trajectory import NOT_SAMPLED, Recording, Routing, Trajectory, encode_routes
from tests.ranks import case, group
from tests.ranks.leaving import leave
from tests.saving import save
from tests.unit.putting import Holding

STEPS, GROUPS, SIZE = 4, 3, 2


class Controller:
    """A queue and its server, on a thread of their own."""

    def __init__(self, routing: Routing) -> None:
        self._routing, self.fetches, self._ready = routing, list[bool](), threading.Event()
        self.queue = BoundedQueue(
            capacity=2 * GROUPS * SIZE,
            batch=GROUPS * SIZE,
            group_size=SIZE,
            max_staleness=1,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    async def _serve(self) -> None:
        self._holding = Holding(self.queue, Recording(self._routing))

        async def answer(request: Any) -> Any:
            if isinstance(request, FindWorker):
                self.fetches.append(request.wait_s == 0.0)
            return await self._holding.answer(request)

        async with Server(answer) as server:
            self.rendezvous = self._holding.rendezvous = await server.start()
            self._serving = asyncio.ensure_future(server.serve())
            self._ready.set()
            await asyncio.gather(self._serving, return_exceptions=True)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(60)

    def put(self, step: int, version: int) -> None:
        """The batch of a step, sampled with a version."""

        async def put() -> None:
            self.queue.set_version(version)
            for number in range(step * GROUPS, (step + 1) * GROUPS):
                self.queue.started(SIZE)
                await self._holding.put([trajectory(number, episode, version, self._routing) for episode in range(SIZE)])

        asyncio.run_coroutine_threadsafe(put(), self._loop).result(60)


def trajectory(group: int, episode: int, version: int, routing: Routing) -> Trajectory:
    random = np.random.default_rng((group, episode))
    length = 5 + (7 * group + 3 * episode) % 11
    sampled = np.arange(length) >= 2
    first = random.integers(0, routing.experts, (length - 1, routing.all_layers, 1))
    key = f"g{group}.e{episode}"
    return Trajectory(
        key=key,
        group=group,
        episode=episode,
        tokens=random.integers(0, 60, length).astype(np.int32),
        loss_mask=sampled,
        logprobs=np.where(sampled, -4 * random.random(length), 0).astype(np.float32),
        versions=np.where(sampled, version, NOT_SAMPLED).astype(np.int32),
        reward=float(episode),
        finish="stop",
        routes=encode_routes(((first + np.arange(routing.top_k)) % routing.experts).astype(np.int32), routing, key),
    )


def main(result: Path, path: Path, layouts: list[str]) -> None:
    group.begin()
    found = {layout: [trained(configuration(path, case.sizes_of(layout)), path, ahead) for ahead in (False, True)] for layout in layouts}
    dropping = configuration(path, case.sizes_of(layouts[0])).model_copy(update={"train": "lora", "lora": LoraSection(rank=4, dropout=0.5)})
    found["dropout"] = [trained(dropping, path, False, stopped) for stopped in (None, 2)]
    group.end(result, group.everyone(found))


def configuration(path: Path, sizes: dict[str, int]) -> Config:
    return parse(
        {
            "run": {"dir": str(path / "run"), "steps": STEPS},
            "model": {"path": str(path / "hf")},
            "task": {"kind": "arithmetic"},
            "warmup": {"steps": 0},
            "rollout": {"groups_per_step": GROUPS, "group_size": SIZE},
            "trainer": {"tokens_per_microbatch": 32, "timeout_s": 60, "ranks": dist.get_world_size(), **sizes},
        }
    )


def started(config: Config, path: Path) -> tuple[gpt.Model, Any]:
    """The model and its optimizer in a process group that has just been made."""
    if mesh.groups.is_initialized():
        leave()
    built = gpt.build(load_hf_config(path / "hf"), config, mesh.start(config.trainer))
    gpt.load_hf(built, path / "hf")
    return built, optimizer.build(config, built)


def trained(config: Config, path: Path, ahead: bool, stopped: int | None = None) -> dict[str, Any]:
    """What every step gave, with a digest of what the rank draws from, and the weights at the end; and of the rank that has the controller,
    which fetches were ahead."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    built, adam = started(config, path)
    place = built.mesh
    routing = models.kept_routing(config, built.hf)
    assert routing is not None
    controller = Controller(routing) if place.rank == 0 else None
    met = [None if controller is None else controller.rendezvous]
    dist.broadcast_object_list(met, 0)
    client = Client(met[0], f"trainer.{place.rank}")  # type: ignore[arg-type]
    other = Client(met[0], f"trainer.{place.rank}.ahead") if ahead and place.tp_rank == 0 else None  # type: ignore[arg-type]
    samples = TrainerSamples(config, place, 0, 0)
    learner = Learner(config, built, adam, client, loop.replay(config, built), NO_PLUGINS, samples, other)
    if controller is not None:
        controller.put(0, 0)
    steps = []
    for number in range(STEPS):
        if controller is not None and number + 1 < STEPS:
            controller.put(number + 1, number)
        dist.barrier()
        if number == stopped:
            saved = save(config, number, built, adam)
            built, adam = started(config, path)
            checkpoint.load(saved, config, built, adam)
            learner = Learner(config, built, adam, client, loop.replay(config, built), NO_PLUGINS, samples)
        leased = batch_client.lease(client, config, number, "rl", lambda: None)
        learned = learner.learn(leased, "rl", number, lambda: None)
        drawn = hashlib.sha256(get_cuda_rng_tracker().get_states()["model-parallel-rng"].numpy().tobytes()).hexdigest()
        steps.append([repr(learned.updates), [item.key for item in leased.items], drawn])
        if learner._ahead is not None and learner._ahead._last is not None:
            wait([learner._ahead._last], 60)
        dist.barrier()
        client.ask(Commit(number), 60)
    learner.close()
    client.close()
    if controller is not None:
        controller.close()
    digest = hashlib.sha256()
    for chunk in built.chunks:
        for name, value in chunk.named_parameters():
            digest.update(name.encode() + value.detach().numpy().tobytes())
    return {"steps": steps, "weights": digest.hexdigest(), "fetches": [] if controller is None else controller.fetches}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
