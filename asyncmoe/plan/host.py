"""Host memory of a trainer rank: copies for checkpoints written during training (`trainer.async_save`), and for deltas (`sync.delta`)."""

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


def delta_base(hf: Mapping[str, Any], parallel: MegatronParallel, training: Training) -> int:
    """Return the bytes of what the fullest trainer rank sent last, all of its share in an update.

    Raises:
        ConfigError: the sizes do not divide the model.
    """
    ranks = (stage * parallel.tp * parallel.dp for stage in range(parallel.pp))
    return max(memory.weights_of(hf, parallel, rank, training.microbatch.dtype).sent for rank in ranks)


def _trained(hf: Mapping[str, Any], parallel: MegatronParallel, training: Training, stage: int) -> RankParameters:
    rank, pass_ = stage * parallel.tp * parallel.dp, training.microbatch
    if pass_.adapter is None:
        return memory.weights_of(hf, parallel, rank, pass_.dtype)
    return memory.adapters_of(family_of(hf).shape_of(hf), pass_.adapter, parallel, rank, pass_.dtype)


def _copy(trained: RankParameters, parallel: MegatronParallel, training: Training) -> int:
    if not training.distributed:
        return trained.nbytes + memory.optimizer_bytes(trained, parallel, training)
    own = -(-trained.dense // parallel.dp) + -(-trained.experts // memory.expert_data_parallel(parallel))
    return trained.nbytes + 12 * own
