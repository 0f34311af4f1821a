"""megatron-core on a machine without CUDA, over gloo.

`prepare()` installs a small set of patches; each names the place of Megatron it answers and raises `ConfigError` when that place
has gone, so an upgrade that needs another answer is noticed at start and not as wrong numbers. With CUDA nothing is patched.

    device       where "cuda" means this machine's processor: devices, streams, events
    rng          Megatron's random-state tracker over the CPU generator
    collectives  what NCCL takes and gloo does not
    moe          the router without Transformer Engine
    optimizer    type names, and the distributed optimizer around torch's Adam
"""

from __future__ import annotations

import warnings

import torch

_prepared = False


def prepare() -> None:
    """Make megatron-core importable and right on this machine. Call it before importing anything of Megatron; calling again does nothing.

    Raises:
        ConfigError: megatron-core is missing, or is of a version whose internals the patches do not know.
    """
    global _prepared
    if _prepared or torch.cuda.is_available():
        return
    from asyncmoe.platform.megatron import collectives, device, moe, optimizer, rng
    from asyncmoe.platform.megatron.patch import require_megatron

    device.install()  # first: Megatron's modules ask for the current device while they are imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Apex, Transformer Engine and others missing; they are meant to be
        require_megatron()
        rng.install()
        collectives.install()
        moe.install()
        optimizer.install()
    _prepared = True
