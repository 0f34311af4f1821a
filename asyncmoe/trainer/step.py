"""One optimizer step over a schedule's micro-batches, and forward-only log-probabilities, through Megatron's pipeline schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.errors import InvariantBroken
from asyncmoe.platform import megatron
from asyncmoe.trainer import objective
from asyncmoe.trainer.batch import MicroBatch
from asyncmoe.trainer.logprobs import target_logprobs
from asyncmoe.trainer.mesh import Mesh
from asyncmoe.trainer.model import Model
from asyncmoe.trainer.objective import Sums

megatron.prepare()

from megatron.core.optimizer import MegatronOptimizer  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from asyncmoe.trainer.optimizer import set_lr  # noqa: E402
from asyncmoe.trainer.replay import Replay  # noqa: E402

_SUMS = ("loss", "rows", "tokens", "clipped", "tis_capped", "ratio", "kl", "logprob_diff", "entropy", "future")
_MAXIMA = ("max_logprob_diff_same_version",)
_AGES = 65
"""Ages told apart; the last stands for all above."""


class Loss(Protocol):
    """What a step minimises."""

    @property
    def temperature(self) -> float:
        """Logits are divided by it."""

    def __call__(self, logprobs: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        """The micro-batch's share of the step's loss (`MicroBatch.weights` make it so), and its sums."""


@dataclass(frozen=True)
class PolicyLoss:
    """The reinforcement-learning objective of the configuration at trainer version `version`."""

    section: ObjectiveSection
    temperature: float
    version: int

    def __call__(self, logprobs: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        rows = objective.Rows(batch.mask, batch.weights, batch.advantages, batch.behaviour, self._proximal(logprobs, batch))
        loss, sums = objective.policy_loss(
            logprobs, rows, clip_low=self.section.clip_low, clip_high=self.section.clip_high, tis_cap=self.section.tis_cap
        )
        sums |= objective.agreement(logprobs, batch.behaviour, batch.mask, batch.versions, batch.pure, self.version)
        ages = self.version - batch.versions[batch.mask]
        return loss, sums | {"ages": torch.bincount(ages.clamp(0, _AGES - 1), minlength=_AGES), "future": (ages < 0).sum()}

    def _proximal(self, logprobs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        if self.section.proximal == "behaviour":
            return batch.behaviour
        if batch.proximal is not None:
            return batch.proximal
        if self.section.updates_per_batch > 1:
            raise InvariantBroken("several updates to a batch need the log-probabilities from before the first one in the micro-batches")
        return logprobs.detach()  # the only update: the policy before it is the one being evaluated


@dataclass(frozen=True)
class SupervisedLoss:
    """Negative log-likelihood of demonstrations."""

    temperature: float = 1.0

    def __call__(self, logprobs: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        return objective.supervised_loss(logprobs, batch.mask, batch.weights)


@dataclass(frozen=True)
class StepMetrics:
    """What a step was like, over all ranks; the same on every rank. Means are over sampled tokens; log-probabilities are in nats.

    Attributes:
        loss: of the whole step.
        grad_norm: before clipping.
        lr: learning rate used.
        rows: tokens of the trajectories, prompts included.
        tokens: sampled tokens.
        clip_fraction: share whose gradient the clip cut.
        tis_capped_fraction: share whose importance weight was capped.
        ratio_mean: of pi_trainer / pi_engine.
        kl: KL(engine || trainer), k3 estimate.
        entropy: of the trainer's distribution.
        logprob_diff_mean: |trainer - engine|.
        logprob_diff_max_same_version: |trainer - engine|, the largest over trajectories sampled wholly by the weights being trained; None
            when there were none.
        ages: sampled tokens by age, trainer's version - token's; ages above 63 count as 64.
        routing_differs: by layer, the share of tokens that the trainer's router would have sent to other experts than the engine's did;
            {} where routing was not kept.
    """

    loss: float
    grad_norm: float
    lr: float
    rows: int
    tokens: int
    clip_fraction: float
    tis_capped_fraction: float
    ratio_mean: float
    kl: float
    entropy: float
    logprob_diff_mean: float
    logprob_diff_max_same_version: float | None
    ages: dict[int, int] = field(default_factory=dict)
    routing_differs: dict[int, float] = field(default_factory=dict)


def train_step(
    model: Model,
    optimizer: MegatronOptimizer,
    microbatches: Sequence[MicroBatch],
    loss: Loss,
    lr: float,
    before_update: Callable[[], None] = lambda: None,
    replay: Replay | None = None,
) -> StepMetrics:
    """Forward, backward, reduction of gradients, clipping, update. Collective over all ranks.

    Args:
        microbatches: this rank's, in the schedule's order; as many on every rank.
        lr: learning rate of this step.
        before_update: called when the gradients are there and no parameter has changed.
        replay: sends the rows of micro-batches that have experts through those.

    Raises:
        InvariantBroken: the loss or the gradient norm is not finite, or a token was sampled by a version that does not exist yet; on every
            rank, before any parameter has changed.
    """
    set_lr(optimizer, lr)
    for chunk in model.ddp:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    results, differs = _run(model, microbatches, partial(_loss_of, model.mesh, loss), forward_only=False, replay=replay)
    sums, maxima = _reduce(model.mesh, results)
    if not math.isfinite(sums["loss"]):
        raise InvariantBroken(f"the loss is {sums['loss']}; no parameter was changed")
    if sums["future"]:
        raise InvariantBroken(f"{int(sums['future'])} tokens come from a later version than the trainer's; no parameter was changed")
    before_update()
    done, grad_norm, _ = optimizer.step()
    if not done:
        raise InvariantBroken("the optimizer skipped its step")
    count = max(sums["tokens"], 1.0)
    largest = maxima["max_logprob_diff_same_version"]
    return StepMetrics(
        loss=sums["loss"],
        grad_norm=float(grad_norm),
        lr=lr,
        rows=int(sums["rows"]),
        tokens=int(sums["tokens"]),
        clip_fraction=sums["clipped"] / count,
        tis_capped_fraction=sums["tis_capped"] / count,
        ratio_mean=sums["ratio"] / count,
        kl=sums["kl"] / count,
        entropy=sums["entropy"] / count,
        logprob_diff_mean=sums["logprob_diff"] / count,
        logprob_diff_max_same_version=largest if largest >= 0 else None,
        ages={age: int(sums[f"age{age}"]) for age in range(_AGES) if sums[f"age{age}"]},
        routing_differs=differs,
    )


def logprobs_only(
    model: Model, microbatches: Sequence[MicroBatch], lengths: Sequence[int], temperature: float, replay: Replay | None = None
) -> dict[int, np.ndarray]:
    """Log-probability of every token under the current weights, without a backward pass. Collective over all ranks.

    Args:
        microbatches: this rank's, as for `train_step`.
        lengths: tokens of every trajectory of the schedule.
        temperature: logits are divided by it.
        replay: as for `train_step`.

    Returns:
        float32[T_i] for every trajectory index i, on every rank, aligned with its tokens; the first is 0, as nothing precedes it.
    """
    results, _ = _run(model, microbatches, partial(_logprobs_of, model.mesh, temperature), forward_only=True, replay=replay)
    starts = np.cumsum([0, *lengths])
    flat = torch.zeros(int(starts[-1]), dtype=torch.float32, device=model.mesh.device)
    if model.mesh.reports:
        for batch, result in zip(microbatches, results, strict=True):
            for index, first, count in batch.places:
                target = int(starts[index]) + 1
                flat[target : target + count - 1] = result["logprobs"][first : first + count - 1]
    dist.all_reduce(flat)
    values = flat.cpu().numpy()
    return {index: values[starts[index] : starts[index + 1]] for index in range(len(lengths))}


Finish = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]
"""(micro-batch, logits [1, T, V / tp]) -> loss, an ignored token count, what to return."""


def _run(
    model: Model, microbatches: Sequence[MicroBatch], finish: Finish, forward_only: bool, replay: Replay | None = None
) -> tuple[list[dict[str, torch.Tensor]], dict[int, float]]:
    """Megatron's schedule over the micro-batches: what `finish` returned for each, on the last pipeline stage, else []; and what
    `Replay.end` returns."""
    if replay is not None:
        replay.forget()
    kwargs = {"fp32_output": False} if model.dtype == torch.bfloat16 else {}  # `target_logprobs` goes to float32 in slices

    def forward(rows: Iterator[tuple[int, MicroBatch]], ddp: torch.nn.Module) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        chunk, batch = next(rows)
        batch = batch.to(model.mesh.device)
        with replay.forward(chunk, batch.experts) if replay is not None else nullcontext():
            output = ddp(batch.tokens, batch.positions, None, packed_seq_params=_packed(batch), **kwargs)
        return output, partial(finish, batch)

    most = max(batch.rows for batch in microbatches)
    if len(model.ddp) > 1 and any(batch.rows != most for batch in microbatches):
        raise InvariantBroken(f"model chunks interleave: got micro-batches of {[b.rows for b in microbatches]} rows, expected equal ones")
    iterators = [iter([(chunk, batch) for batch in microbatches]) for chunk in range(len(model.ddp))]
    schedule = get_forward_backward_func()
    with torch.set_grad_enabled(not forward_only):
        results: list[dict[str, torch.Tensor]] = schedule(
            forward_step_func=forward,
            data_iterator=iterators,
            model=list(model.ddp),
            num_microbatches=len(microbatches),
            seq_length=most,
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return results, replay.end() if replay is not None else {}


def _packed(batch: MicroBatch) -> PackedSeqParams | None:
    if batch.cu_seqlens is None:
        return None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )


def _loss_of(mesh: Mesh, loss: Loss, batch: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    logprobs, entropy = target_logprobs(logits[0], batch.targets, loss.temperature, mesh.tp_group, batch.support, entropy=True)
    value, sums = loss(logprobs, batch)
    assert entropy is not None
    sums = sums | {
        "loss": value.detach().clone(),  # the schedule may scale the loss it is given in place
        "rows": torch.tensor(sum(count for _, _, count in batch.places)),
        "entropy": torch.where(batch.mask, entropy, 0.0).sum(),
    }
    return value, _no_tokens(logits), sums


def _logprobs_of(
    mesh: Mesh, temperature: float, batch: MicroBatch, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    logprobs, _ = target_logprobs(logits[0], batch.targets, temperature, mesh.tp_group, batch.support)
    return logprobs.sum(), _no_tokens(logits), {"logprobs": logprobs}


def _no_tokens(like: torch.Tensor) -> torch.Tensor:
    """Returning a count at all keeps the schedule from dividing the loss by the number of micro-batches; its value is not used."""
    return torch.zeros([], dtype=torch.int, device=like.device)


def _reduce(mesh: Mesh, results: Sequence[dict[str, torch.Tensor]]) -> tuple[dict[str, float], dict[str, float]]:
    """Sums and maxima over micro-batches and over all ranks. Each row is counted by one rank (`Mesh.reports`)."""
    names = [*_SUMS, *(f"age{age}" for age in range(_AGES))]
    total = torch.zeros(len(names), dtype=torch.float64)
    maximum = torch.full((len(_MAXIMA),), -1.0, dtype=torch.float64)
    for result in results if mesh.reports else ():
        scalars = torch.stack([result.get(name, torch.zeros([])).double().cpu() for name in _SUMS])
        total += torch.cat([scalars, result.get("ages", torch.zeros(_AGES)).double().cpu()])
        maximum = torch.maximum(maximum, torch.stack([result.get(name, maximum[i]).double().cpu() for i, name in enumerate(_MAXIMA)]))
    total, maximum = total.to(mesh.device), maximum.to(mesh.device)
    dist.all_reduce(total)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX)
    return dict(zip(names, total.tolist(), strict=True)), dict(zip(_MAXIMA, maximum.tolist(), strict=True))
