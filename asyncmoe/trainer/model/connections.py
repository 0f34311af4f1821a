"""How many queues CUDA issues a process's kernels through."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping

from asyncmoe.config.training import TrainerSection

log = logging.getLogger(__name__)
VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


def in_order(trainer: TrainerSection, environ: MutableMapping[str, str]) -> None:
    """Have kernels begin in the order they are issued, where tensor parallelism overlaps collectives with products: Megatron issues the
    collective first and counts on that (`LinearWithGradAccumulationAndAsyncCommunication` of megatron-core's tensor_parallel/layers.py).
    From Blackwell on Megatron no longer needs it (megatron/training/arguments.py); it is set there too, at a cost nobody measured.
    CUDA reads the variable once: call this before CUDA is initialised.

    The user's own value wins; the log says what it costs.
    """
    if trainer.tp == 1:
        return
    if (given := environ.setdefault(VARIABLE, "1")) != "1":
        told = "collectives of trainer.tp > 1 may begin after the products they should overlap with; unset it"
        log.warning("%s=%s: %s", VARIABLE, given, told)
