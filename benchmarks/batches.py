"""The cost of each step's batch for a trainer rank, beyond compute, and for the controller."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from typing import Any

import msgspec
import numpy as np

from asyncmoe.errors import InvariantBroken, WaitTimeout
from asyncmoe.log.log import Place
from asyncmoe.queue.admission import Admission
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.service import QueueService
from asyncmoe.rollout.workers.worker import Worker
from asyncmoe.rpc.messages import Commit, Fetched, FindWorker, Reply, WorkerFound
from asyncmoe.rpc.server import Server
from asyncmoe.rpc.worker_messages import WorkerFetch
from asyncmoe.trainer.data.schedule import BatchGrid, schedule
from asyncmoe.trajectory import Recording, Trajectory, encode, encode_routes
from benchmarks.batches_rank import DP, GROUP, QWEN3_30B, TOKENS_PER_MICROBATCH, WIDTH, BatchJob, RankTook
from benchmarks.provenance import here
from benchmarks.unlogged import Unlogged

DISTINCT = 32
"""Distinct trajectories; the queue holds each several times under different names, so that the data exceed a cache."""
SCHEDULED = 65_536
WORK_S = 600.0


@dataclass(frozen=True)
class BatchCase:
    """Sizes of one case. `compute_s`: seconds a rank sleeps per step instead of computing."""

    batch: int = 1024
    tokens: int = 4096
    steps: int = 5
    compute_s: float = 4.0


WAYS = {"tp1": 1, "tp2": 2}
"""Ranks of the tensor-parallel group."""


def run(case: BatchCase | None = None, rounds: int = 3, ways: Sequence[str] = tuple(WAYS)) -> dict[str, Any]:
    """Measure all ways in turn, `rounds` times.

    The ranks form one tensor-parallel group of the `DP` that share each batch; the other groups do not exist. All batches are in the
    queue from the beginning, so no rank waits for an engine. The first step is not counted.

    Returns:
        For each way, the medians of its slowest rank over rounds and steps of lease_s, fetch_s, first_s, exposed_s and cpu_s (see
        `StepTook`), the largest exposed_s and peak_MB; copies: trajectory bytes sent by the controller, as a multiple of the group's share.
        schedule: seconds and CPU seconds of planning `SCHEDULED` trajectories of various lengths.

    Raises:
        WaitTimeout: a rank did not finish.
        InvariantBroken: a rank failed, or got wrong tokens.
    """
    case = case or BatchCase()
    results: dict[str, Any] = {**here(), **{name: getattr(case, name) for name in ("batch", "tokens", "steps", "compute_s")}}
    results |= {"dp": DP, "rounds": rounds, "share_MB": 0.0, "schedule": scheduled(), "ways": {}}
    found: dict[str, list[tuple[list[RankTook], int]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            found[way].append(asyncio.run(_measure(case, WAYS[way])))
    share = case.batch // DP * sum(memoryview(part).nbytes for part in encode(trajectories(case.tokens)[0]))
    results["share_MB"] = round(share / 1e6, 1)
    for way, measured in found.items():
        results["ways"][way] = figures(case, measured, share)
    return results


def figures(case: BatchCase, measured: list[tuple[list[RankTook], int]], share: int) -> dict[str, float]:
    """Return the figures of one way from its ranks' times and the bytes sent in each round."""
    expected = [case.batch // DP * case.tokens] * case.steps
    for ranks, _ in measured:
        for rank in ranks:
            if (got := [step.tokens for step in rank.steps]) != expected:
                raise InvariantBroken(f"bench batches: a rank got {got} tokens in its steps, expected {expected}")
    names = ("lease_s", "fetch_s", "first_s", "exposed_s", "cpu_s")
    later = [[rank.steps[number] for rank in ranks] for ranks, _ in measured for number in range(1, case.steps)]
    slowest = {name: [max(getattr(step, name) for step in together) for together in later] for name in names}
    return {
        **{name: round(median(values), 4) for name, values in slowest.items()},
        "exposed_s_max": round(max(slowest["exposed_s"]), 4),
        "peak_MB": round(max(rank.peak for ranks, _ in measured for rank in ranks) / 1e6, 1),
        "begun_MB": round(max(rank.begun for ranks, _ in measured for rank in ranks) / 1e6, 1),
        "copies": round(median(sent for _, sent in measured) / (share * case.steps), 4),
    }


def scheduled(count: int = SCHEDULED) -> dict[str, float]:
    """Measure the planning of a batch of trajectories with 64 to `TOKENS_PER_MICROBATCH` tokens, most of them short."""
    random = Random(0)
    lengths = [min(TOKENS_PER_MICROBATCH, 64 + int(random.lognormvariate(7, 1))) for _ in range(count)]
    begin, cpu = time.monotonic(), time.process_time()
    schedule(lengths, DP, TOKENS_PER_MICROBATCH, True, BatchGrid(), WIDTH)
    return {"trajectories": count, "s": round(time.monotonic() - begin, 3), "cpu_s": round(time.process_time() - cpu, 3)}


def trajectories(tokens: int) -> list[Trajectory]:
    """`DISTINCT` trajectories with random contents and the routes of Qwen3-30B-A3B."""
    routing = QWEN3_30B
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


async def _samples_nothing(*_: object) -> tuple[Trajectory, ...]:
    raise NotImplementedError


async def _measure(case: BatchCase, tp: int) -> tuple[list[RankTook], int]:
    """Return the ranks' times, and the trajectory bytes sent."""
    total, sent = case.batch * case.steps, 0
    queue = BoundedQueue(Admission(case.batch, case.steps), Unlogged(), capacity=total, group_size=GROUP)
    worker = Worker(_samples_nothing, GROUP, Recording(QWEN3_30B))
    made = trajectories(case.tokens)
    for group in range(total // GROUP):
        queue.started(GROUP)
        members = [made[(group * GROUP + i) % len(made)] for i in range(GROUP)]
        held = await worker.hold([replace(t, key=f"g{group}.e{i}.a0.t0", group=group, episode=i) for i, t in enumerate(members)], 1)
        await queue.put(replace(held, place=Place(1, 0)))
    service, together = QueueService(queue, config_digest=""), asyncio.Barrier(tp)

    async def answer(request: Any) -> Reply | tuple[Reply, list[Any]]:
        nonlocal sent
        if isinstance(request, Commit):
            await together.wait()
        if isinstance(request, FindWorker):
            return WorkerFound(to)
        if isinstance(request, WorkerFetch):
            frames = await worker.fetch(request.places, request.layers, request.masks)
            sent += sum(memoryview(part).nbytes for part in frames)
            return Fetched(), frames
        return await service(request)

    async with Server(answer) as server:
        to = await server.start()
        serving = asyncio.ensure_future(server.serve())
        try:
            with tempfile.TemporaryDirectory() as folder:
                jobs = [BatchJob(to, f"{folder}/meeting", rank, tp, case.steps, case.batch, case.compute_s) for rank in range(tp)]
                return await asyncio.gather(*map(_rank, jobs)), sent
        finally:
            serving.cancel()


async def _rank(job: BatchJob) -> RankTook:
    pipe = asyncio.subprocess.PIPE
    text = msgspec.json.encode(job).decode()
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "benchmarks.batches_rank", text, stdout=pipe, stderr=pipe)
    try:
        out, why = await asyncio.wait_for(process.communicate(), WORK_S)
    except TimeoutError:
        raise WaitTimeout(f"rank {job.tp_rank} of the bench", "to finish", WORK_S) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise InvariantBroken(f"bench batches: rank {job.tp_rank} failed: {why.decode()[-2000:]}")
    return msgspec.json.decode(out.splitlines()[-1], type=RankTook)


def table(results: dict[str, Any]) -> str:
    """Format the results of `run`."""
    names = ("lease_s", "fetch_s", "first_s", "exposed_s", "exposed_s_max", "cpu_s", "peak_MB", "copies")
    lines = [f"{'':12}" + "".join(f"{name:>15}" for name in names)]
    lines += [f"{way:12}" + "".join(f"{r[name]:>15}" for name in names) for way, r in results["ways"].items()]
    planned = results["schedule"]
    return "\n".join([*lines, f"{planned['trajectories']} trajectories scheduled in {planned['s']} s"])
