"""Megatron's optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from asyncmoe.config import Config
from asyncmoe.errors import InvariantBroken
from asyncmoe.platform import megatron
from asyncmoe.platform.megatron import adam
from asyncmoe.trainer.model.gpt import Model
from asyncmoe.trainer.model.lr import lr_at as lr_at

megatron.prepare()

from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer  # noqa: E402


def build(config: Config, model: Model) -> MegatronOptimizer:
    """Build Adam (AdamW) with global-norm clipping; its state is replicated, or sharded over data-parallel ranks.

    Build it after the weights are loaded: with bfloat16 it copies them into float32 masters.

    A step whose gradient norm is not finite raises `InvariantBroken` on every rank before any parameter changes.
    """
    section = config.trainer.optimizer
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
        ),
        list(model.ddp),
    )
    # `ChainedOptimizer.step` calls this for the norm, reduced over all ranks, before it clips and steps; it would continue with NaN.
    optimizer.get_grad_norm = _finite(optimizer.get_grad_norm)
    fuse(optimizer, model)
    return optimizer


def fuse(optimizer: MegatronOptimizer, model: Model) -> None:
    """On a GPU, use torch's fused kernel if the optimizer is torch's Adam. Call it again after a checkpoint is loaded."""
    if model.mesh.device.type == "cuda":
        adam.fuse(one.optimizer for one in getattr(optimizer, "chained_optimizers", [optimizer]))


def set_lr(optimizer: MegatronOptimizer, lr: float) -> None:
    """Set the learning rate of all parameters from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def _finite(norm_of: Callable[[], Any]) -> Callable[[], float]:
    def get_grad_norm() -> float:
        norm = float(norm_of())
        if not math.isfinite(norm):
            raise InvariantBroken(f"the gradient norm is {norm}; no parameter was changed")
        return norm

    return get_grad_norm
