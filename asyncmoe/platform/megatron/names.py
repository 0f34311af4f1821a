"""Patches for optimizers that identify parameters by the name of a CUDA type.

The mixed-precision and distributed optimizers identify parameters by `param.type() == "torch.cuda.FloatTensor"`, and clipping asserts the
same for gradients. During these functions, and only then, `Tensor.type` returns CUDA's names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from asyncmoe.platform.megatron.patch import module, replace, wrap


def install() -> None:
    """Wrap the two constructors and the clipping function."""
    optimizer, distributed, clip = module("optimizer.optimizer"), module("optimizer.distrib_optimizer"), module("optimizer.clip_grads")
    wrap(optimizer.Float16OptimizerWithFloat16Params, "__init__", _with_cuda_names)
    wrap(distributed.DistributedOptimizer, "__init__", _with_cuda_names)
    wrap(clip, "clip_grad_by_total_norm_fp32", _with_cuda_names)
    replace(optimizer, "clip_grad_by_total_norm_fp32", clip.clip_grad_by_total_norm_fp32)  # bound by name at import


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
