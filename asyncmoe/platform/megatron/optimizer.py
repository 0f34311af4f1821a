"""Megatron's optimizers on tensors that are not CUDA tensors, and around torch's Adam.

The mixed-precision and distributed optimizers recognise parameters by `param.type() == "torch.cuda.FloatTensor"`, and clipping
asserts it of gradients. Those functions run with `Tensor.type` answering in CUDA's names; nothing outside them sees that.

Without Transformer Engine and Apex the distributed optimizer wraps torch's Adam, whose state has a `step` that
`optimizer/distrib_optimizer.py` does not handle when it loads a checkpoint (0.16.1 and 0.19.2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from asyncmoe.platform.megatron.patch import module, replace, wrap


def install() -> None:
    """Wrap the constructors, the clipping, and the distributed optimizer's loading."""
    optimizer, distributed, clip = module("optimizer.optimizer"), module("optimizer.distrib_optimizer"), module("optimizer.clip_grads")
    wrap(optimizer.Float16OptimizerWithFloat16Params, "__init__", _with_cuda_names)
    wrap(distributed.DistributedOptimizer, "__init__", _with_cuda_names)
    wrap(clip, "clip_grad_by_total_norm_fp32", _with_cuda_names)
    replace(optimizer, "clip_grad_by_total_norm_fp32", clip.clip_grad_by_total_norm_fp32)  # bound by name when imported
    wrap(distributed.DistributedOptimizer, "state_dict", _seeded)
    wrap(distributed.DistributedOptimizer, "load_state_dict", _own_step_each)
    wrap(distributed.DistributedOptimizer, "_set_main_param_and_optimizer_states", _only_given_states)


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


def _seeded(original: Callable[..., Any]) -> Callable[..., Any]:
    """`state_dict` asserts that every parameter has the same `step`; a fresh optimizer, about to be loaded, has none."""

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                state.setdefault("step", torch.tensor(0.0))
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(parameter.data)
        return original(self)

    return state_dict


def _own_step_each(original: Callable[..., Any]) -> Callable[..., Any]:
    """`load_state_dict` gives all parameters one `step` tensor, and torch's Adam adds 1 to it for each of them: silently wrong from the
    second step on. Each gets its own."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    return load_state_dict


def _only_given_states(_: Callable[..., Any]) -> Callable[..., Any]:
    """The original indexes the given tensors with every key of Adam's state, `step` included (KeyError), and copies into a leaf
    outside `no_grad` (RuntimeError)."""

    @torch.no_grad()
    def _set_main_param_and_optimizer_states(self: Any, model_param: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        state = self.optimizer.state[main]
        for name, value in tensors.items():
            if name != "step":
                (main if name == "param" else state[name]).copy_(value)

    return _set_main_param_and_optimizer_states
