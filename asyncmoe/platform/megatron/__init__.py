"""megatron-core on a machine without CUDA, over gloo; and what it lacks wherever Transformer Engine is not installed.

`prepare()` installs a small set of patches; each names the place of Megatron it answers and raises `ConfigError` when that place
has gone, so an upgrade that needs another answer is noticed at start and not as wrong numbers. With CUDA and Transformer Engine it patches
nothing by itself.

    without CUDA
        device       where "cuda" means this machine's processor: devices, streams, events
        rng          Megatron's random-state tracker over the CPU generator
        collectives  what NCCL takes and gloo does not
        names        parameters that are not of "torch.cuda" types
    without Transformer Engine
        moe          a name the router reads
        mla          what latent attention believes
        adam         the distributed optimizer's state around torch's Adam
    everywhere, by whoever saves checkpoints (`asyncmoe.trainer.model.checkpoint`) and builds the model (`asyncmoe.trainer.model.layers`)
        writer       checkpoints are written without processes that outlive a rank
        rope         rotary angles of packed sequences without waiting for the device
"""

from __future__ import annotations

import importlib.util
import warnings

import torch

_prepared = False


def prepare() -> None:
    """Make megatron-core importable and right on this machine. Call it before importing anything of Megatron; calling again does nothing.

    Raises:
        ConfigError: megatron-core is missing, or is of a version whose internals the patches do not know.
        InvariantBroken: Megatron was imported before.
    """
    global _prepared
    cuda, engine = torch.cuda.is_available(), importlib.util.find_spec("transformer_engine") is not None
    if _prepared or (cuda and engine):
        return
    from asyncmoe.platform.megatron import adam, collectives, device, mla, moe, names, rng
    from asyncmoe.platform.megatron.patch import require_megatron

    if not cuda:
        _quiet()
        device.install()  # first: Megatron's modules ask for the current device while they are imported
    require_megatron(compile=cuda)
    if not cuda:
        rng.install()
        collectives.install()
        names.install()
    if not engine:
        moe.install()
        mla.install()
        adam.install()
    _prepared = True


def _quiet() -> None:
    """Megatron warns, in every process, of each accelerator library that is missing and of its own deprecated settings; torch of names
    that Megatron uses. None of it is for the user to mend."""
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated")
    warnings.filterwarnings("ignore", message="Please use DTensor instead and we are deprecating ShardedTensor")
