"""A trainer rank that takes one training step of one packed micro-batch and counts its tensors: a process of `benchmarks.step_memory`.

A separate program, `python -m benchmarks.step_memory_rank JOB`, which writes its figures as one line of JSON.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from asyncmoe.config import Config, parse
from asyncmoe.models import trainer_parallel
from asyncmoe.plan import budget, memory
from asyncmoe.platform import collectives
from asyncmoe.trainer.data import batch
from asyncmoe.trainer.data.batch import MicroBatch
from asyncmoe.trainer.losses import PolicyLoss
from asyncmoe.trainer.model import gpt as model
from asyncmoe.trainer.model import mesh, optimizer
from asyncmoe.trainer.step import train_step
from asyncmoe.trajectory import Trajectory
from benchmarks.live_tensors import LiveTensors
from benchmarks.memory import Growth, give_back
from benchmarks.step_memory import PARTS, StepJob, StepMemory


def run(job: StepJob) -> StepMemory:
    """Take a step of a few tokens, which creates the optimizer's state, then the counted step."""
    torch.set_num_threads(job.threads)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", init_method=f"file://{job.meeting}", rank=job.rank, world_size=job.cp)
    config = configured(job)
    place = mesh.start(config.trainer)
    grown = Growth()
    built = model.build(job.hf, config, place)
    stepped = optimizer.build(config, built)
    over_ranks = partial(collectives.summed, group=place.cp_group) if place.cp > 1 else None
    loss = PolicyLoss(config.objective, config.rollout.temperature, 0, over_ranks=over_ranks)
    train_step(built, stepped, [micro_batch(config, place, [16 * job.cp])], loss, 1e-4)

    packed = micro_batch(config, place, job.lengths)
    held = {
        "weights": [tensor for _, tensor in model.named_tensors(built)],
        "gradients": [cast(Any, parameter).main_grad for chunk in built.chunks for parameter in chunk.parameters()],
        "optimizer": list(_state(stepped)),
    }
    give_back()
    grown.again()
    kept = 0
    with LiveTensors(tensor for tensors in held.values() for tensor in tensors) as seen:

        def after_layers(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            nonlocal kept
            kept = seen.now - given[0].nbytes  # the last layer's output is the next module's

        decoder: Any = built.chunks[-1].decoder
        decoder.final_layernorm.register_forward_pre_hook(after_layers)
        before, began = seen.now, time.monotonic()
        train_step(built, stepped, [packed], loss, 1e-4)
        seconds = time.monotonic() - began
    live = {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in held.items()}
    live |= {"activations": kept - before, "working set": seen.peak - kept}
    planned = memory.trainer(job.hf, trainer_parallel(config), budget.training(config, job.hf, cpu=True))[place.pp_rank].parts
    found = StepMemory(live, {name: planned[name] for name in PARTS}, grown.peak_bytes(), seen.largest, seconds)
    mesh.stop()
    return found


def configured(job: StepJob) -> Config:
    """Return the configuration of a run with this rank."""
    trainer = {
        "ranks": job.cp,
        "cp": job.cp,
        "dtype": "float32",
        "tokens_per_microbatch": sum(job.lengths),
        "optimizer": {"distributed": False},
    }
    run: dict[str, Any] = {"run": {"dir": "unused", "steps": 1}, "model": {"path": "unused"}, "task": {"kind": "arithmetic"}}
    return parse({**run, "trainer": {**trainer, **job.trainer}})


def micro_batch(config: Config, place: mesh.Mesh, lengths: Sequence[int]) -> MicroBatch:
    """Return this rank's part of a micro-batch in which every token but the sequences' first ones is trained on."""
    random = np.random.default_rng(0)
    made = {number: _trajectory(number, random.integers(0, 64, length).astype(np.int32)) for number, length in enumerate(lengths)}
    ones, weights = [1.0] * len(made), [1.0 / sum(lengths)] * len(made)
    return batch.pack(made, list(made), advantages=ones, weights=weights, grid=place.grid, packed=True, cp_rank=place.cp_rank)


def _trajectory(number: int, tokens: np.ndarray) -> Trajectory:
    mask = np.arange(len(tokens)) > 0
    return Trajectory(
        key=f"g{number}.e0",
        group=number,
        episode=0,
        tokens=tokens,
        loss_mask=mask,
        logprobs=np.where(mask, -4.0, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        reward=1.0,
        finish="stop",
        prefix_version=0,
    )


def _state(stepped: Any) -> Iterator[torch.Tensor]:
    """Yield the optimizers' state of each parameter."""
    for one in getattr(stepped, "chained_optimizers", [stepped]):
        for state in one.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.ndim)


if __name__ == "__main__":
    print(msgspec.json.encode(run(msgspec.json.decode(sys.argv[1], type=StepJob))).decode())
