"""Patches that run megatron-core without CUDA (over gloo) and without Transformer Engine.

`prepare()` installs a small set of patches. Each names its target in Megatron and raises `ConfigError` if the target is gone, so that an
incompatible upgrade fails at startup instead of producing wrong numbers. With CUDA and Transformer Engine `prepare()` patches nothing.

    without CUDA
        device       maps "cuda" to the CPU: devices, streams, events
        collectives  calls that NCCL accepts and gloo does not
        assumptions  random states, type names
    without Transformer Engine
        assumptions  a name that the router reads, latent attention's flag
        adam         the distributed optimizer's state with torch's Adam
    everywhere (`asyncmoe.trainer.model.checkpoint` installs writer and reader, `asyncmoe.trainer.model.layers` installs rope)
        writer       writes checkpoints without processes that outlive a rank
        reader       reads checkpoints without running code from them
        rope         rotary angles of packed sequences without device synchronization

`state_boxes` changes how Megatron describes the distributed optimizer's state, only while a save is planned.

`packed_attention`, `grouped_experts` and `local_layers` patch nothing: they are layers that replace Transformer Engine's, and are
imported after `prepare()`.
"""

from __future__ import annotations

import importlib.util
import warnings

import torch

_prepared = False


def prepare() -> None:
    """Make megatron-core importable and correct on this machine. Call it before importing Megatron; later calls do nothing.

    Raises:
        ConfigError: megatron-core is missing, or its version has internals that the patches do not support.
        InvariantBroken: Megatron was already imported.
    """
    global _prepared
    cuda, engine = torch.cuda.is_available(), importlib.util.find_spec("transformer_engine") is not None
    if _prepared or (cuda and engine):
        return
    from asyncmoe.platform.megatron import adam, assumptions, collectives, device
    from asyncmoe.platform.megatron.patch import require_megatron

    if not cuda:
        _quiet()
        device.install()  # first: Megatron's modules ask for the current device while they are imported
    require_megatron(compile=cuda)
    if not cuda:
        collectives.install()
        assumptions.use_cpu_random_state()
        assumptions.use_cuda_type_names()
    if not engine:
        assumptions.define_router_gemm()
        assumptions.clear_latent_flag()
        adam.install()
    _prepared = True


def _quiet() -> None:
    """Silence warnings that users cannot act on: in every process Megatron warns about missing accelerator libraries and its own deprecated
    settings, and torch about names that Megatron uses."""
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated")
    warnings.filterwarnings("ignore", message="Please use DTensor instead and we are deprecating ShardedTensor")
