"""Worker: results of every layout for trajectories with recorded experts and ids. `kept.py RESULT REFERENCES LAYOUT...`

A layout is a list of the trainer's settings with the ways to pack, such as "tp=2,pp=2,recompute=full:packed+single".
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.models import family_of
from asyncmoe.platform import collectives
from asyncmoe.queue.group_buffer import describe
from asyncmoe.telemetry.samples.records import digest_of
from asyncmoe.trainer import losses, objective, step
from asyncmoe.trainer.data import batch
from asyncmoe.trainer.model import gpt, mesh, optimizer
from asyncmoe.trainer.model.balance import Balance
from asyncmoe.trainer.model.replay import Replay
from asyncmoe.trainer.samples import BatchSamples
from asyncmoe.trajectory import Trajectory, decode, decode_routes
from tests.ranks import case, group, parity
from tests.ranks.leaving import leave

KEPT = 10


def main(path: str, *layouts: str) -> dict[str, Any]:
    found = {}
    for layout, _, ways in (one.partition(":") for one in layouts):
        found[layout] = {how: parity.worst(kept(Path(path), layout, how == "packed")) for how in ways.split("+")}
    return found


def kept(path: Path, layout: str, packed: bool) -> dict[str, Any]:
    """Errors against the references; maxima, of gradients relative to the tensor's largest element."""
    if mesh.groups.is_initialized():
        leave()
    config = case.config(path, ranks=dist.get_world_size(), pack=packed, optimizer={"clip_grad": 1e9}, **case.settings_of(layout))
    place = mesh.start(config.trainer)
    job = parity.Job(path, config, place, torch.load(path / "kept.pt", weights_only=False))
    built = job.model()
    routing = family_of(built.hf).routing(built.hf)
    replay = Replay(built.chunks, built.config, routing, (place.tp_rank, place.tp))
    known = dict(enumerate(decode(frames) for frames in msgspec.msgpack.decode((path / "kept.msgpack").read_bytes())))
    weights = objective.token_weights([int(t.loss_mask.sum()) for t in known.values()], "token_mean")
    batches = parity.packed(known, job.schedule, config, place, weights, routing=replay.routing)
    logprobs = step.logprobs_only(built, batches, case.LENGTHS, case.TEMPERATURE, replay)
    adam = optimizer.build(config, built)
    stepped = step.train_step(built, adam, batches, WithTop(case.TEMPERATURE), lr=0.0, replay=replay)
    unkept = step.logprobs_only(built, batches, case.LENGTHS, case.TEMPERATURE)
    wanted = job.reference["logprobs"]
    found = {
        "logprobs": max(float(np.abs(logprobs[i] - want).max()) for i, want in enumerate(wanted)),
        "unkept_logprobs": max(float(np.abs(unkept[i] - want).max()) for i, want in enumerate(wanted)),
        "loss": abs(stepped.loss - job.reference["loss"]),
        "gradients": parity.relative_error(parity.gradients(built), parity.expected(built, path / "kept")),
        "routers": sum(name.endswith("router.weight") for name in parity.gradients(built)) * 1.0,
        "differ": max(
            abs(stepped.routing_mismatch[layer] - share) for layer, share in zip(routing.layers, job.reference["differ"], strict=True)
        ),
        "microbatches": len(batches),
    }
    samples = sampled(built, adam, batches, known, replay, place)  # overwrites the gradients
    chosen = {i: known[i].loss_mask for i in samples}
    differ = {i: np.array([0, *job.reference["by_row"][i]]) for i in samples}
    return found | {
        "sampled_logprobs": max(float(np.abs(one["logprobs"] - ends(wanted[i][chosen[i]])).max()) for i, one in samples.items()),
        "sampled_mismatch": max(float(np.abs(one["mismatch"] - ends(differ[i][chosen[i]])).max()) for i, one in samples.items()),
        "sampled_digests": float(sum(one["digest"] != digest_of(known[i].tokens, known[i].logprobs) for i, one in samples.items())),
        "biases": balanced(built, adam, batches, known, replay, place) if built.config.moe_router_enable_expert_bias else 0.0,
    }


class WithTop(losses.SupervisedLoss):
    """Adds the log-probabilities of the most probable ids, each weighted by what was recorded."""

    def __call__(self, logprobs: Any, batch: Any, unmasked: Any, top: Any = None) -> Any:
        loss, sums = super().__call__(logprobs, batch, unmasked)
        return loss + (0.0 if top is None else ((batch.top_logprobs.t().exp() * top).sum(1) * batch.weights).sum()), sums


def sampled(
    built: gpt.Model, adam: Any, batches: list[batch.MicroBatch], known: dict[int, Trajectory], replay: Replay, place: mesh.Mesh
) -> dict[int, dict[str, Any]]:
    """What samples hold of all trajectories but the second, of the first and last `KEPT` / 2 sampled tokens."""
    every = tuple(range(len(known)))
    collected = BatchSamples([describe(t) for t in known.values()], [i for i in every if i != 1], KEPT, place.reports)
    loss = replace(parity.policy_loss(built.mesh, ObjectiveSection()), observe=collected.observe)
    step.train_step(built, adam, batches, loss, lr=0.0, replay=replay, differs=collected.count)
    flat = collectives.total(collected.values(known)).numpy()
    found = {}
    for i, block in collected.blocks.items():
        values = flat[block.start + 1 : block.end].reshape(-1, block.count)
        found[i] = {"logprobs": values[0], "mismatch": values[-1], "digest": int(flat[block.start])}
    return found


def balanced(
    built: gpt.Model, adam: Any, batches: list[batch.MicroBatch], known: dict[int, Trajectory], replay: Replay, place: mesh.Mesh
) -> float:
    """The difference of selection biases after a step from an update by exactly the recorded experts."""
    routers = parity.routers(built)
    before = [router.expert_bias.clone() for _, router in routers]
    balance = Balance(built.chunks, replay.routing.all_layers, case.BIAS_RATE, (place.tp_rank, place.tp))
    step.train_step(replace(built, balance=balance), adam, batches, losses.SupervisedLoss(), lr=0.0, replay=replay)
    errors = [0.0]
    for (layer, router), old in zip(routers, before, strict=True):
        chosen = [decode_routes(t.routes, t.key)[t.routes.layers.index(layer)].ravel() for t in known.values() if t.routes is not None]
        tokens = np.bincount(np.concatenate(chosen), minlength=len(old))
        wanted = old + torch.from_numpy(case.BIAS_RATE * np.sign(tokens.mean() - tokens))
        errors.append(float((router.expert_bias - wanted).abs().max()))
    return max(errors)


def ends(values: np.ndarray) -> np.ndarray:
    """The values of the tokens that samples keep."""
    return values if len(values) <= KEPT else np.concatenate([values[: KEPT // 2], values[-KEPT // 2 :]])


if __name__ == "__main__":
    group.run(main)
