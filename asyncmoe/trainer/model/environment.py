"""Environment variables of a trainer rank that CUDA, torch and Transformer Engine read once, when they start."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from asyncmoe.config import Config
from asyncmoe.config.trainer import TrainerSection
from asyncmoe.rpc import nccl_settings

log = logging.getLogger(__name__)
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOCATOR = "PYTORCH_ALLOC_CONF"
_OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""Another name of `ALLOCATOR`, which torch still reads (c10/cuda/CUDAAllocatorConfig.h)."""
SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
_BLACKWELL = (10, 0)


def prepare(config: Config) -> None:
    """Complete this rank's environment. Call it before CUDA is initialised and before Transformer Engine is imported.

    On Hopper, Transformer Engine's blocks of float8 get float32 scales (`SCALES`), as in engines (`asyncmoe.reshard.float8`), instead of
    powers of two, unless the user set the variable. Newer GPUs support only powers of two (Transformer Engine 2.20,
    docs/features/low_precision_training/fp8_blockwise_scaling).
    """
    os.environ.update(before_cuda(config.trainer, os.environ) | nccl_settings.set_defaults(os.environ))
    import torch  # which reads the variables above when it first uses a GPU

    from asyncmoe.trainer.model import deterministic

    deterministic.start(config)
    device = int(os.environ.get("LOCAL_RANK", "0"))
    if config.trainer.precision == "fp8" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < _BLACKWELL:
        os.environ.setdefault(SCALES, "1")


def before_cuda(trainer: TrainerSection, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to a rank's environment. A value set by the user wins.

    - `CONNECTIONS`, the number of queues through which CUDA issues kernels: 1, which makes kernels start in issue order, if tensor
      parallelism overlaps collectives with matrix products: Megatron issues the collective first and relies on the order
      (`LinearWithGradAccumulationAndAsyncCommunication` of megatron-core's tensor_parallel/layers.py). From Blackwell on, Megatron does not
      need the setting (megatron/training/arguments.py); its cost there was not measured. The log warns of the cost of another value.
    - `ALLOCATOR`: segments that grow, so that micro-batches of varying size do not fragment a nearly full GPU. Such memory cannot be shared
      by handle (cudaIpcGetMemHandle). The trainer shares only message buffers, which it does not allocate with torch (csrc/device.cu). A
      preloaded torch_memory_saver cannot release such memory.
    """
    found = {}
    if trainer.tp > 1:
        found[CONNECTIONS] = given.get(CONNECTIONS, "1")
        if found[CONNECTIONS] != "1":
            told = "collectives of trainer.tp > 1 may start after the matrix products they should overlap; unset the variable"
            log.warning("%s=%s: %s", CONNECTIONS, found[CONNECTIONS], told)
    if not {ALLOCATOR, _OLD_ALLOCATOR} & given.keys() and "memory_saver" not in given.get("LD_PRELOAD", ""):
        found[ALLOCATOR] = "expandable_segments:True"
    return found
