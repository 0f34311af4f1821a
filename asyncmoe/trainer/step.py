"""One optimizer step over a schedule's micro-batches, and forward-only log-probabilities, through Megatron's pipeline schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from asyncmoe.errors import InvariantBroken
from asyncmoe.platform import collectives, megatron
from asyncmoe.telemetry import heartbeats
from asyncmoe.trainer import checks, objective
from asyncmoe.trainer.data.batch import MicroBatch
from asyncmoe.trainer.data.microbatches import MicroBatches
from asyncmoe.trainer.losses import Loss, PolicyLoss
from asyncmoe.trainer.model.gpt import Model
from asyncmoe.trainer.model.logprobs import LogProbs, target_logprobs
from asyncmoe.trainer.model.mesh import Mesh
from asyncmoe.trainer.profiling import mark

megatron.prepare()

from megatron.core.optimizer import MegatronOptimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from asyncmoe.platform.megatron.packed_attention import PackedSequences  # noqa: E402
from asyncmoe.trainer.model import optimizer as optimizers  # noqa: E402
from asyncmoe.trainer.model import output_head  # noqa: E402
from asyncmoe.trainer.model.optimizer import set_rates  # noqa: E402
from asyncmoe.trainer.model.output_head import OutputHead  # noqa: E402
from asyncmoe.trainer.model.replay import Replay  # noqa: E402

_COMMON: Mapping[str, tuple[int, ...]] = {"loss": (), "rows": (), "entropy": ()}
"""Names and shapes of the sums collected for every loss."""


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimizer step over all ranks; the same on every rank.

    Attributes:
        loss: loss of the whole step.
        grad_norm: gradient norm before clipping; 0 if every token was rejected, or the update was refused before the norm was known.
        lr: learning rate used.
        rows: tokens of the trajectories, prompts included.
        tokens: sampled tokens.
        entropy: entropy of the trainer's distribution over the whole vocabulary, in nats; mean over sampled tokens.
        updated: False if no parameter changed: every token was rejected, or the update was refused.
        refused: whether the guard refused the update.
        figures: `PolicyLoss.figures`, by field name in `telemetry.schema.Step`; {} for other losses.
        routing_mismatch: by layer, the share of tokens for which the trainer's router would have chosen other experts than the engine's;
            {} if routing was not kept.
    """

    loss: float
    grad_norm: float
    lr: float
    rows: int
    tokens: int
    entropy: float
    updated: bool
    figures: Mapping[str, Any]
    routing_mismatch: Mapping[int, float]
    refused: bool = False


def train_step(
    model: Model,
    optimizer: MegatronOptimizer,
    microbatches: MicroBatches | Sequence[MicroBatch],
    loss: Loss,
    lr: float,
    before_update: Callable[[], None] = lambda: None,
    replay: Replay | None = None,
    differs: Differs = lambda batch: None,
    guard: checks.Guard = checks.finite,
) -> StepMetrics:
    """Run the forward and backward passes, reduce and clip the gradients, update the parameters. Collective over all ranks.

    Args:
        microbatches: this rank's micro-batches in schedule order; every rank has the same number.
        lr: learning rate of this step.
        before_update: called when the gradients are complete, before any parameter changes.
        replay: routes micro-batches with recorded experts through these experts.
        differs: see `Differs`.
        guard: may refuse the update.

    Raises:
        ConfigError: a plug-in fails on this rank.
        InvariantBroken: a plug-in's value is not finite, or a token was sampled by a version that does not exist yet. Raised on every
            rank, before any parameter changes, like the errors of `guard`.
    """
    set_rates(optimizer, lr)
    for chunk in model.ddp:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    if model.balance is not None:
        model.balance.forget()
    with mark("forward and backward"):
        results, mismatch = _run(
            model, microbatches, partial(_loss_of, model.mesh, loss), forward_only=False, replay=replay, differs=differs
        )
    sums = _reduce(model.mesh, results, {**_COMMON, **loss.sums})
    policy = loss if isinstance(loss, PolicyLoss) else None
    if policy is not None:
        policy.check(sums)
    value, tokens = float(sums["loss"]), int(sums["tokens"])
    figures = {} if policy is None else policy.figures(sums)
    allowed = guard({"loss": value, **({} if policy is None else policy.checked(figures))})
    if sums.get("future", 0):
        raise InvariantBroken(f"{int(sums['future'])} tokens come from a later version than the trainer's; no parameter was changed")
    scale, norm, updated = objective.scale(sums), 0.0, False
    if allowed:
        before_update()
        norm, updated = _update(model, optimizer, scale, guard) if scale else (0.0, False)
    return StepMetrics(
        loss=value * scale,
        grad_norm=norm,
        lr=lr,
        rows=int(sums["rows"]),
        tokens=tokens,
        entropy=float(sums["entropy"]) / max(tokens, 1),
        updated=updated,
        figures=figures,
        routing_mismatch=mismatch,
        refused=not updated and bool(scale),
    )


def _update(model: Model, optimizer: MegatronOptimizer, scale: float, guard: checks.Guard) -> tuple[float, bool]:
    """Update the parameters with the gradients times `scale`, unless the guard refuses; return the norm of the scaled gradients before
    clipping, and whether parameters changed."""
    if scale != 1.0:
        for chunk in model.ddp:
            chunk.scale_gradients(scale)
    with mark("optimizer"):
        norm, updated = optimizers.step(optimizer, lambda norm: guard({"grad_norm": norm}))
    if updated and model.balance is not None:
        model.balance.update()
    return norm, updated


def logprobs_only(
    model: Model,
    microbatches: MicroBatches | Sequence[MicroBatch],
    lengths: Sequence[int],
    temperature: float,
    replay: Replay | None = None,
    sampled_only: bool = False,
) -> dict[int, np.ndarray]:
    """Compute the log-probability of tokens under the current weights, without a backward pass. Collective over all ranks.

    Args:
        microbatches: as for `train_step`.
        lengths: token count of every trajectory in the schedule.
        temperature: divides the logits.
        replay: as for `train_step`.
        sampled_only: leave out tokens that were not sampled.

    Returns:
        float32[T_i] by trajectory index i, on every rank, aligned with the tokens; 0 for the first token, which nothing precedes, and for
        tokens that are left out.
    """
    with mark("log-probabilities"):
        finish, batches = partial(_logprobs_of, model.mesh, temperature), MicroBatches.of(microbatches)
        results, _ = _run(model, batches, finish, forward_only=True, replay=replay, sampled_only=sampled_only)
    starts = np.cumsum([0, *lengths])
    flat = torch.zeros(int(starts[-1]), dtype=torch.float32, device=model.mesh.device)
    if model.mesh.reports:
        for places, result in zip(batches.places, results, strict=True):
            for index, first, count in places:
                target = int(starts[index]) + 1
                flat[target : target + count - 1] = result["logprobs"][first : first + count - 1]  # 0 in other ranks' rows
    values = collectives.total(flat).cpu().numpy()
    return {index: values[starts[index] : starts[index + 1]] for index in range(len(lengths))}


Finish = Callable[[MicroBatch, OutputHead, torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]
"""(micro-batch, head of n rows, their hidden rows [1, n, H]) -> loss, an ignored token count, named results."""


Differs = Callable[[MicroBatch], torch.Tensor | None]
"""Returns, for a micro-batch of T rows, int32[T] to which each of this rank's routers adds 1 for rows it would have routed differently
from the engine; None: not counted by row."""


def _run(
    model: Model,
    microbatches: MicroBatches | Sequence[MicroBatch],
    finish: Finish,
    forward_only: bool,
    replay: Replay | None = None,
    differs: Differs = lambda batch: None,
    sampled_only: bool = True,
) -> tuple[list[dict[str, torch.Tensor]], dict[int, float]]:
    """Run Megatron's schedule over the micro-batches. Return each micro-batch's results from `finish`, [] except on the last pipeline
    stage, and the result of `Replay.end`, {} without replay."""
    if replay is not None:
        replay.forget()
    kwargs = {"fp32_output": False} if model.dtype == torch.bfloat16 else {}  # `target_logprobs` converts blocks to float32

    def forward(rows: Iterator[tuple[int, MicroBatch]], ddp: torch.nn.Module) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        heartbeats.beat("a micro-batch")
        chunk, batch = next(rows)
        bounds = [] if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
        chosen = batch.mask.nonzero().squeeze(1).to(model.mesh.device) if sampled_only else None
        batch = batch.to(model.mesh.device)
        counting = model.balance.counting(batch) if model.balance is not None and not forward_only else nullcontext()
        replayed = replay.forward(chunk, batch.experts, differs(batch)) if replay is not None else nullcontext()
        packed = None if batch.cu_seqlens is None else PackedSequences(batch.cu_seqlens, bounds, batch.max_seqlen)
        with counting, replayed, output_head.replaced(chosen, model.chunks[chunk]) as head:
            output = ddp(batch.tokens, batch.positions, None, packed_seq_params=packed, **kwargs)
        return output, partial(finish, batch, head)

    batches = MicroBatches.of(microbatches)
    iterators = [zip(repeat(chunk), some) for chunk, some in enumerate(batches.shared(len(model.ddp)))]
    schedule = get_forward_backward_func()
    with torch.set_grad_enabled(not forward_only):
        results: list[dict[str, torch.Tensor]] = schedule(
            forward_step_func=forward,
            data_iterator=iterators,
            model=list(model.ddp),
            num_microbatches=len(microbatches),
            seq_length=max(batches.rows),
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return results, replay.end() if replay is not None else {}


def _loss_of(
    mesh: Mesh, loss: Loss, batch: MicroBatch, head: OutputHead, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    found = _logprobs(mesh, loss.temperature, batch, head, hidden, learning=True)
    assert found.entropy is not None
    value, sums = loss(found.sampled, batch, found.whole if loss.wants_unmasked else None, found.top)
    sums = sums | {
        "loss": value.detach().clone(),  # the schedule may scale the loss in place
        "rows": (batch.segments >= 0).sum(),
        "entropy": torch.where(batch.mask, found.entropy, 0.0).sum(),
    }
    return value, _no_tokens(hidden), sums


def _logprobs_of(
    mesh: Mesh, temperature: float, batch: MicroBatch, head: OutputHead, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    logprobs = _logprobs(mesh, temperature, batch, head, hidden).sampled
    return logprobs.sum(), _no_tokens(hidden), {"logprobs": batch.everywhere(logprobs)}


def _logprobs(
    mesh: Mesh, temperature: float, batch: MicroBatch, head: OutputHead, hidden: torch.Tensor, learning: bool = False
) -> LogProbs:
    """Return `target_logprobs` of all T rows: 0 for rows that the head leaves out. `learning`: with the entropy, and the top ids if any."""
    top = head.take(batch.top_ids.t()) if learning and batch.top_ids is not None else None
    support = batch.support if batch.support is None or head.rows is None else batch.support.take(head.rows)
    found = target_logprobs(hidden[0], head.weight, head.take(batch.targets), temperature, mesh.tp_group, support, learning, top)
    rest = (None if one is None else head.spread(one, batch.rows) for one in (found.whole, found.entropy, found.top))
    return LogProbs(head.spread(found.sampled, batch.rows), *rest)


def _no_tokens(like: torch.Tensor) -> torch.Tensor:
    """Return a token count that is not used: it only keeps the schedule from dividing the loss by the number of micro-batches."""
    return torch.zeros([], dtype=torch.int, device=like.device)


def _reduce(mesh: Mesh, results: Sequence[dict[str, torch.Tensor]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Reduce results over micro-batches and ranks: by sum, or by maximum (-1 without values) for names starting with "max_". All ranks
    take part, but only one rank counts each row (`Mesh.reports`).

    Returns:
        float64 arrays of the given shapes.
    """
    reduced: dict[str, np.ndarray] = {}
    for names, nothing, operation in (
        ([name for name in shapes if not name.startswith("max_")], 0.0, dist.ReduceOp.SUM),
        ([name for name in shapes if name.startswith("max_")], -1.0, dist.ReduceOp.MAX),
    ):
        if not names:
            continue
        sizes = [math.prod(shapes[name]) for name in names]
        total = torch.full((sum(sizes),), nothing, dtype=torch.float64)
        for result in results if mesh.reports else ():
            one = torch.cat([result[name].detach().double().cpu().reshape(-1) for name in names])
            total = total + one if operation == dist.ReduceOp.SUM else torch.maximum(total, one)
        parts = np.split(collectives.total(total, operation).cpu().numpy(), np.cumsum(sizes)[:-1])
        reduced |= {name: part.reshape(shapes[name]) for name, part in zip(names, parts, strict=True)}
    return reduced
