"""A trainer rank that fetches its share of each step's batch but sleeps instead of computing: a process of `benchmarks.batches`.

A separate program, `python -m benchmarks.batches_rank JOB`, which writes its times as one line of JSON. Requests, plan and micro-batches
are the trainer's own.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from asyncmoe.rpc.client import Client
from asyncmoe.rpc.item import Item
from asyncmoe.rpc.messages import Commit, Leased
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.trajectory import Routing

ANSWER_S = 120.0
DP, GROUP = 8, 8
TOKENS_PER_MICROBATCH = 32768
WIDTH = 8192
"""As for `asyncmoe.trainer.data.schedule.cost`."""
QWEN3_30B = Routing(all_layers=48, layers=tuple(range(48)), top_k=8, experts=128)


class BatchJob(msgspec.Struct, frozen=True):
    """A rank's task. `where`: a rendezvous; `meeting`: the rendezvous file of a group's ranks; `compute_s`: seconds slept per step."""

    where: Rendezvous
    meeting: str
    tp_rank: int
    tp: int
    steps: int
    batch: int
    compute_s: float


class StepTook(msgspec.Struct, frozen=True):
    """Times of one step. `lease_s`, `fetch_s` (until all trajectories are decoded) and `first_s` (until the first micro-batch is packed)
    are consecutive; `exposed_s` is the step's time not slept; `cpu_s` covers all threads of the process."""

    lease_s: float
    fetch_s: float
    first_s: float
    exposed_s: float
    cpu_s: float
    tokens: int


class RankTook(msgspec.Struct, frozen=True):
    """Figures of all steps; memory in bytes, `begun` before the first step."""

    steps: tuple[StepTook, ...]
    begun: int
    peak: int


def settings(job_batch: int, steps: int) -> Any:
    """Return the parts of a configuration that leasing and planning use."""
    return SimpleNamespace(
        warmup=SimpleNamespace(steps=0, batch=0),
        run=SimpleNamespace(steps=steps),
        rollout=SimpleNamespace(batch=job_batch, max_new_tokens=1),
        queue=SimpleNamespace(staleness=SimpleNamespace(max_staleness=steps), lease_timeout_s=ANSWER_S),
        queue_capacity=steps * job_batch,
        objective=SimpleNamespace(updates_per_batch=1, aggregation="token_mean"),
        trainer=SimpleNamespace(tokens_per_microbatch=TOKENS_PER_MICROBATCH, pack=True),
    )


def run(job: BatchJob) -> RankTook:
    """Take all steps."""
    import torch
    import torch.distributed as dist

    from asyncmoe.trainer.data import batch_client, held
    from asyncmoe.trainer.data.schedule import BatchGrid

    torch.set_num_threads(1)
    group = None
    if job.tp > 1:
        dist.init_process_group("gloo", init_method=f"file://{job.meeting}", rank=job.tp_rank, world_size=job.tp)
        group = dist.group.WORLD
    place: Any = SimpleNamespace(tp=job.tp, tp_rank=job.tp_rank, cp=1, cp_rank=0, dp=DP, dp_rank=0, device=torch.device("cpu"))
    place.replica_group, place.fetches = group, job.tp_rank == 0
    place.grid = BatchGrid(job.tp)
    config, layers = settings(job.batch, job.steps), QWEN3_30B.layers

    def planned(items: Sequence[Item]) -> Any:
        return batch_client.plan_updates(items, "rl", config, place, WIDTH)

    client = Client(job.where, "trainer.0")

    def step(number: int) -> Iterator[float]:
        """Yield when a part of the step ends."""
        leased: Leased = batch_client.lease(client, config, number, "rl", lambda: None)
        yield time.monotonic()
        updates = planned(leased.items)
        wanted = sorted(i for update in updates for i in update.schedule.indices(place.dp_rank))
        trajectories = batch_client.fetch(partial(held.fetch, client), place, leased, wanted, layers, place.last_stage)
        yield time.monotonic()
        nothing = {i: np.zeros(len(one), np.float32) for i, one in trajectories.items()}
        made = batch_client.microbatches(updates[0], trajectories, nothing, config, place, QWEN3_30B)
        for _ in made:
            yield time.monotonic()
            time.sleep(job.compute_s / len(made))
        yield float(sum(map(len, trajectories.values())))
        client.ask(Commit(number), ANSWER_S)

    begun, took = _peak(), []
    for number in range(job.steps):
        if group is not None:
            dist.barrier()
        begin, cpu = time.monotonic(), time.process_time()
        leased, fetched, first, *_, tokens = step(number)
        exposed = time.monotonic() - begin - job.compute_s
        took.append(StepTook(leased - begin, fetched - leased, first - fetched, exposed, time.process_time() - cpu, int(tokens)))
    client.close()
    return RankTook(tuple(took), begun, _peak())


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


if __name__ == "__main__":
    print(msgspec.json.encode(run(msgspec.json.decode(sys.argv[1], type=BatchJob))).decode())
