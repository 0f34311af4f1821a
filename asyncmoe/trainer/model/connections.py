"""The number of queues through which CUDA issues a process's kernels."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping

from asyncmoe.config.trainer import TrainerSection

log = logging.getLogger(__name__)
VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


def in_order(trainer: TrainerSection, environ: MutableMapping[str, str]) -> None:
    """Set `VARIABLE` to 1, which makes kernels start in issue order, if tensor parallelism overlaps collectives with matrix products:
    Megatron issues the collective first and relies on the order (`LinearWithGradAccumulationAndAsyncCommunication` of megatron-core's
    tensor_parallel/layers.py). From Blackwell on, Megatron does not need the setting (megatron/training/arguments.py); its cost there was
    not measured. CUDA reads the variable once: call this before CUDA is initialised.

    A value set by the user wins; the log then warns of its cost.
    """
    if trainer.tp == 1:
        return
    if (given := environ.setdefault(VARIABLE, "1")) != "1":
        told = "collectives of trainer.tp > 1 may start after the matrix products they should overlap; unset the variable"
        log.warning("%s=%s: %s", VARIABLE, given, told)
