"""Megatron's optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from asyncmoe.config import Config
from asyncmoe.errors import InvariantBroken
from asyncmoe.platform import collectives, megatron
from asyncmoe.platform.megatron import adam
from asyncmoe.trainer.model import step_threads
from asyncmoe.trainer.model.gpt import Model
from asyncmoe.trainer.model.gpu_settings import optimizer_arguments

megatron.prepare()

from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer  # noqa: E402


def build(config: Config, model: Model) -> MegatronOptimizer:
    """Build Adam (AdamW) with global-norm clipping. Its state is replicated or sharded over data-parallel ranks; under `trainer.memory`,
    part of it is in host memory, or its averages are in bfloat16.

    Build it after the weights are loaded: with bfloat16 it copies them into float32 masters.

    Step it with `step`, which asks for permission before any parameter changes.
    """
    section, memory = config.trainer.optimizer, config.trainer.memory
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=section.lr,
            min_lr=section.min_lr,
            weight_decay=section.weight_decay,
            adam_beta1=section.betas[0],
            adam_beta2=section.betas[1],
            adam_eps=section.eps,
            clip_grad=section.clip_grad,
            bf16=model.dtype == torch.bfloat16,
            params_dtype=model.dtype,
            use_distributed_optimizer=model.ddp[0].ddp_config.use_distributed_optimizer,
            exp_avg_dtype=getattr(torch, memory.exp_avg_dtype),
            exp_avg_sq_dtype=getattr(torch, memory.exp_avg_sq_dtype),
            **optimizer_arguments(memory),
        ),
        list(model.ddp),
    )
    adam.fuse(optimizer)
    return optimizer


def set_rates(optimizer: MegatronOptimizer, lr: float) -> None:
    """Set the learning rate of all parameters from the next step on, and the weight decay, which is 0 for norms and biases.

    Megatron's `OptimizerParamScheduler` does this before each step: the optimizer marks groups (`wd_mult`), but decays them all equally.
    """
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = lr, optimizer.config.weight_decay * group["wd_mult"]


def step(optimizer: MegatronOptimizer, allows: Callable[[float], bool]) -> tuple[float, bool]:
    """Take a step unless it is refused. Collective over all ranks.

    Args:
        allows: called with the gradient norm before clipping, the same on every rank, NaN if any rank's norm is not finite; returns whether
            to change parameters, and may raise.

    Returns:
        The norm, and whether parameters changed.
    """
    norm_of = optimizer.get_grad_norm

    def asking() -> float:
        norm = _agreed(float(norm_of()))
        if not allows(norm):
            raise _Refused(norm)
        return norm

    # `ChainedOptimizer.step` calls this to get the norm before it clips and steps; it would continue with NaN.
    optimizer.get_grad_norm = asking
    try:
        with step_threads.for_step(offloaded=optimizer.config.optimizer_cpu_offload):
            done, norm, _ = optimizer.step()
    except _Refused as refused:
        return float(refused.args[0]), False
    finally:
        optimizer.get_grad_norm = norm_of
    if not done:
        raise InvariantBroken("the optimizer skipped its step")
    return float(norm), True


class _Refused(Exception):
    """Aborts Megatron's step before it changes a parameter. Its argument is the norm."""


def _agreed(norm: float) -> float:
    """Return the largest norm of all ranks, NaN if one is not finite. Megatron reduces it only within a replica; replicas may differ in
    the last bit, and all ranks must reach the same decision."""
    finite = math.isfinite(norm)
    mine = torch.tensor([0.0 if finite else 1.0, norm if finite else 0.0], dtype=torch.float64)
    unfinite, largest = collectives.total(mine, dist.ReduceOp.MAX).tolist()
    return math.nan if unfinite else float(largest)
