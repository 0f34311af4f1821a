"""Host memory of a trainer rank: copies for checkpoints written during training (`trainer.async_save`) and of a reference policy, and the
optimizer's state that is offloaded (`trainer.memory.optimizer_offload`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncmoe.models import MegatronParallel, family_of
from asyncmoe.plan import memory
from asyncmoe.plan.memory import RankParameters, Training


def checkpoint_copy(hf: Mapping[str, Any], parallel: MegatronParallel, training: Training) -> int:
    """Return the bytes of the second copy that the fullest trainer rank keeps: what it writes of a checkpoint.

    That is the weights (of a replica one rank writes them) and the optimizer's state: 8 bytes a parameter for Adam's moments, and 4 for
    float32 weights unless the checkpoint's weights are these. A sharded optimizer saves its own float32 weights even so.

    Raises:
        ConfigError: the sizes do not divide the model.
    """
    return max(_copy(_trained(hf, parallel, training, stage), parallel, training) for stage in range(parallel.pp))


def optimizer_state(hf: Mapping[str, Any], parallel: MegatronParallel, training: Training) -> int:
    """Return the bytes of the optimizer's state that the fullest trainer rank keeps in pinned memory: float32 weights and averages, and
    gradients as float32, 16 bytes for each parameter that the CPU updates (`HybridDeviceOptimizer`).

    Raises:
        ConfigError: the sizes do not divide the model.
    """
    held = (memory.offloaded(_trained(hf, parallel, training, stage), parallel, training) for stage in range(parallel.pp))
    return 16 * max(held)


def reference(hf: Mapping[str, Any], parallel: MegatronParallel, training: Training) -> int:
    """Return the bytes of the reference policy's weights, which the fullest trainer rank keeps there while they are not in use; 0 with
    adapters, which are switched off instead.

    Raises:
        ConfigError: the sizes do not divide the model.
    """
    if not training.reference or training.microbatch.adapter is not None:
        return 0
    ranks = (stage * parallel.tp * parallel.dp for stage in range(parallel.pp))
    return max(memory.weights_of(hf, parallel, rank, training.microbatch.dtype).nbytes for rank in ranks)


def _trained(hf: Mapping[str, Any], parallel: MegatronParallel, training: Training, stage: int) -> RankParameters:
    rank, pass_ = stage * parallel.tp * parallel.dp, training.microbatch
    if pass_.adapter is None:
        return memory.weights_of(hf, parallel, rank, pass_.dtype)
    return memory.adapters_of(family_of(hf).shape_of(hf), pass_.adapter, parallel, rank, pass_.dtype)


def _copy(trained: RankParameters, parallel: MegatronParallel, training: Training) -> int:
    if not training.distributed:
        return trained.nbytes + trained.all * training.state
    return trained.nbytes + 12 * memory.stepped(trained, parallel, training)
