"""The queue between one controller and two trainer ranks on this machine, next to Redis, Ray, a plain copy and a plain TCP stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import msgspec
import numpy as np

from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.service import QueueService
from asyncmoe.rpc.messages import Commit, Reply
from asyncmoe.rpc.server import Server
from asyncmoe.trajectory import Recording, Routing, Trajectory, encode, encode_routes
from benchmarks import queue_floor, queue_peers, queue_stores
from benchmarks.provenance import here
from benchmarks.queue_case import QueueCase, Ranks, expect_all, figures
from benchmarks.queue_rank import RANKS, Job

GROUP = 8
DISTINCT = 32
"""Trajectories made; the queue holds each several times under different names, so that sources are larger than a cache."""


SHAPES = {
    "small": Routing(all_layers=16, layers=tuple(range(16)), top_k=4, experts=32),
    "qwen3-30b-a3b": Routing(all_layers=48, layers=tuple(range(48)), top_k=8, experts=128),
}


def run(sizes: QueueCase | None = None, rounds: int = 3, shapes: Sequence[str] = tuple(SHAPES), peers: bool = True) -> dict[str, Any]:
    """All ways in turn, `rounds` times, for each shape.

    Ways: "local", the controller's Unix socket; "local_share", the same when a rank asks for its share of a step at once and holds all of
    it, as the trainer does; "tcp", its TCP socket with CURVE; "redis_payloads" and "ray_payloads", the same queue with queue.payloads,
    Redis over TCP without a key; "redis", a stream with a consumer group, likewise; "ray", an actor that hands out references to objects
    of the same frames. What comes out is decoded and every digest checked, in each. Putting and taking do not overlap here: `put` is one
    process that fills the queue, the rest is two ranks that drain it.

    Returns:
        for each shape "bytes" of a trajectory and, by way, medians of the rounds: trajectories_per_s, GBps, requests_per_s of the drain;
        put_per_s; processor_s_per_GB, of the drain, the server's and the ranks'; or a text that says why the way is absent. "floor":
        `benchmarks.queue_floor.run`.

    Raises:
        WaitTimeout: a rank did not become ready or did not finish.
        InvariantBroken: something other than what was put came out.
    """
    sizes = sizes or QueueCase()
    results: dict[str, Any] = {
        **here(),
        **{name: getattr(sizes, name) for name in ("steps", "batch", "tokens", "ask")},
        "ranks": RANKS,
        "rounds": rounds,
        "shapes": {},
    }
    for name in shapes:
        made = trajectories(SHAPES[name], sizes.tokens)
        size = sum(memoryview(frame).nbytes for frame in encode(made[0]))
        ways: dict[str, Any] = {}
        measured: dict[str, list[dict[str, float]]] = {}
        for _ in range(rounds):
            for way in ("local", "local_share", "tcp"):
                asked = replace(sizes, ask=sizes.batch // RANKS) if way == "local_share" else sizes
                measured.setdefault(way, []).append(asyncio.run(_ours(made, SHAPES[name], asked, way != "tcp")))
            for store, through in queue_stores.WAYS.items():
                if peers and not queue_peers.absent(store):
                    measured.setdefault(f"{store}_payloads", []).append(through(made, SHAPES[name], sizes, _ours))
            for way, peer in queue_peers.PEERS.items():
                why = queue_peers.absent(way) if peers else "not asked for"
                if why:
                    ways[way] = why
                else:
                    measured.setdefault(way, []).append(peer([encode(t) for t in made], sizes))
        for way, found in measured.items():
            ways[way] = {key: round(median(one[key] for one in found), 3) for key in found[0]}
        floor = queue_floor.run(size, sizes.batch)
        results["shapes"][name] = {"bytes": size, "ways": ways, "floor": floor}
    return results


def trajectories(routing: Routing, tokens: int) -> list[Trajectory]:
    """`DISTINCT` trajectories with random contents."""
    random = np.random.default_rng(0)
    made = []
    mask = np.arange(tokens) >= tokens // 8
    for number in range(DISTINCT):
        first = random.integers(0, routing.experts, (tokens - 1, routing.all_layers, 1))
        routes = ((first + np.arange(routing.top_k)) % routing.experts).astype(np.int32)
        made.append(
            Trajectory(
                key=str(number),
                group=0,
                episode=number,
                tokens=random.integers(0, 150_000, tokens).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -random.random(tokens), 0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                reward=float(number % 2),
                finish="stop",
                routes=encode_routes(routes, routing, str(number)),
            )
        )
    return made


async def _ours(
    made: list[Trajectory], routing: Routing, sizes: QueueCase, local: bool, store: queue_stores.Store | None = None
) -> dict[str, float]:
    """The controller's own queue, service and server in this process, with its trajectories here or in a store."""
    total = sizes.steps * sizes.batch
    recording, keep = Recording(routing), None if store is None else store.keep
    queue = BoundedQueue(capacity=total, batch=sizes.batch, group_size=GROUP, max_staleness=sizes.steps, recording=recording, keep=keep)

    async def put(group: int) -> None:
        queue.started(GROUP)
        members = [made[(group * GROUP + i) % len(made)] for i in range(GROUP)]
        await queue.put_group([replace(t, key=f"g{group}.e{i}.a0.t0", group=group, episode=i) for i, t in enumerate(members)])

    begin, together = time.monotonic(), 1 if store is None else queue_stores.AT_ONCE
    for group in range(0, total // GROUP, together):
        await asyncio.gather(*(put(one) for one in range(group, min(group + together, total // GROUP))))
    put_s = time.monotonic() - begin
    service = QueueService(queue, run="bench", config_digest="")
    all_ranks = asyncio.Barrier(RANKS)

    async def answer(request: Any) -> Reply | tuple[Reply, list[Any]]:
        # A trainer's ranks commit a step once all have taken their share of it.
        if isinstance(request, Commit):
            await all_ranks.wait()
        return await service(request)

    async with Server(answer) as server:
        to = await server.start()
        serving = asyncio.ensure_future(server.serve())
        where = msgspec.json.encode(to if local else msgspec.structs.replace(to, local_dir="")).decode()
        section = "" if store is None else store.section.model_dump_json()
        ranks = await Ranks.start([Job("asyncmoe", where, rank, sizes.steps, sizes.batch, sizes.ask, section) for rank in range(RANKS)])
        try:
            spent = time.process_time() + (0.0 if store is None else store.cpu_s())
            took = await ranks.go()
            spent = time.process_time() + (0.0 if store is None else store.cpu_s()) - spent
        finally:
            await ranks.end()
            serving.cancel()
    expect_all(took, sizes)
    return figures(took, spent, put_s)


def table(results: dict[str, Any]) -> str:
    """The results of `run` for a reader."""
    lines = [f"{'':24}{'traj/s':>10}{'GB/s':>8}{'put/s':>9}{'cpu s/GB':>10}"]
    for name, shape in results["shapes"].items():
        lines.append(f"{name}: {shape['bytes'] / 1e6:.2f} MB a trajectory of {results['tokens']} tokens")
        for way, r in shape["ways"].items():
            if isinstance(r, str):
                lines.append(f"  {way:22}{r}")
            else:
                lines.append(
                    f"  {way:22}{r['trajectories_per_s']:>10.0f}{r['GBps']:>8.2f}{r['put_per_s']:>9.0f}{r['processor_s_per_GB']:>10.2f}"
                )
        lines.extend(f"  {way:22}{'':10}{rate:>8.2f}" for way, rate in shape["floor"].items())
    return "\n".join(lines)
