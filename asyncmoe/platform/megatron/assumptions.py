"""Patches for four places where Megatron takes CUDA or Transformer Engine for granted."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from asyncmoe.platform.megatron.patch import gone, module, replace, wrap


def use_cpu_random_state() -> None:
    """Run Megatron's random-state tracker on the CPU generator: replace the state accessors of `torch.cuda` and Megatron's own.

    `tensor_parallel/random.py` keeps a generator state for each kind of parallel region and swaps it in and out, also around recomputed
    layers. Without CUDA there is only the CPU generator, so all of its "CUDA" states are the CPU's.
    """
    tracker = module("tensor_parallel.random")
    replace(torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state())
    replace(torch.cuda, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
    replace(torch.cuda, "manual_seed", lambda seed: torch.manual_seed(seed))
    replace(tracker, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    replace(tracker, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
    # `fork` warns about a CPU state that changed in a GPU region, because both are the same state here.
    logging.getLogger(tracker.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def use_cuda_type_names() -> None:
    """Give parameters CUDA type names inside the functions that check them.

    The mixed-precision and distributed optimizers identify parameters by `param.type() == "torch.cuda.FloatTensor"`, and clipping asserts
    the same for gradients. During these functions, and only then, `Tensor.type` returns CUDA's names.
    """
    optimizer, distributed, clip = module("optimizer.optimizer"), module("optimizer.distrib_optimizer"), module("optimizer.clip_grads")
    wrap(optimizer.Float16OptimizerWithFloat16Params, "__init__", _with_cuda_names)
    wrap(distributed.DistributedOptimizer, "__init__", _with_cuda_names)
    wrap(clip, "clip_grad_by_total_norm_fp32", _with_cuda_names)
    replace(optimizer, "clip_grad_by_total_norm_fp32", clip.clip_grad_by_total_norm_fp32)  # bound by name at import


def define_router_gemm() -> None:
    """Define `te_general_gemm` as None in `moe_utils.py`, which reads it even if its import failed.

    0.16.1 imports it inside a `try`, then tests `te_general_gemm is not None` whenever `moe_router_dtype` is set: a NameError without
    Transformer Engine. 0.19 itself defines it as None.
    """
    utils = module("transformer.moe.moe_utils")
    if hasattr(utils, "te_general_gemm"):
        return
    router = getattr(utils, "RouterGatingLinearFunction", None)
    if router is None or "te_general_gemm" not in router.forward.__code__.co_names:
        raise gone("moe_utils.te_general_gemm")
    utils.te_general_gemm = None  # type: ignore[attr-defined]


def clear_latent_flag() -> None:
    """Clear `HAVE_TE` in `multi_latent_attention.py`. It is set there although the import yields only stand-ins, with which `isinstance`
    raises."""
    replace(module("transformer.multi_latent_attention"), "HAVE_TE", False)


def _with_cuda_names(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        original = torch.Tensor.type

        def cuda_type(self: torch.Tensor, *a: Any, **k: Any) -> Any:
            answer = original(self, *a, **k)
            return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) and ".cuda." not in answer else answer

        torch.Tensor.type = cuda_type  # type: ignore[assignment, method-assign]
        try:
            return function(*args, **kwargs)
        finally:
            torch.Tensor.type = original  # type: ignore[method-assign]

    return call
