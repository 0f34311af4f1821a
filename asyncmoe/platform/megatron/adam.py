"""Patches for the distributed optimizer with torch's Adam.

Without Transformer Engine and Apex the optimizer wraps torch's Adam, whose state has a `step` that `optimizer/distrib_optimizer.py` does
not handle when it loads a checkpoint (0.16.1 and 0.19.2). Megatron cannot select torch's fused kernel; `fuse` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from asyncmoe.platform.megatron.any_layout import optimizers
from asyncmoe.platform.megatron.patch import module, wrap


def install() -> None:
    """Wrap the distributed optimizer's methods that save and load state."""
    optimizer = module("optimizer.distrib_optimizer").DistributedOptimizer
    wrap(optimizer, "state_dict", _seeded)
    wrap(optimizer, "load_state_dict", _own_step_each)
    wrap(optimizer, "_set_main_param_and_optimizer_states", _only_given_states)


def fuse(optimizer: Any) -> None:
    """Make torch's Adam, if Megatron's optimizer uses it, update all parameters of a group in one kernel. Call it again after loading a
    checkpoint, which restores its own setting, or none if Transformer Engine's Adam saved it.

    torch keeps the setting in each group (torch/optim/adam.py, `_init_group`), and then keeps `step` on the parameter's device. Of an
    offloaded optimizer, the CPU's members take the setting from its groups before each step, and keep `step` where it belongs.
    """
    hybrid = module("optimizer.cpu_offloading").HybridDeviceOptimizer
    for inner in (one.optimizer for one in optimizers(optimizer)):
        if not isinstance(inner, (torch.optim.Adam, hybrid)):  # AdamW is a subclass
            continue
        for group in inner.param_groups:
            group["fused"], group["foreach"] = True, False
            if isinstance(inner, hybrid):
                continue
            for parameter in group["params"]:
                if "step" in (state := inner.state.get(parameter, {})):
                    state["step"] = state["step"].to(parameter.device, torch.float32)


def _seeded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Create missing state first, because `state_dict` asserts that all parameters have the same `step`, and a fresh optimizer about to
    be loaded has none."""

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                state.setdefault("step", torch.tensor(0.0, device=parameter.device if group.get("fused") else None))
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(parameter.data)
        return original(self)

    return state_dict


def _own_step_each(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give each parameter its own `step` tensor. `load_state_dict` gives all parameters the same one, to which torch's Adam adds 1 per
    parameter: silently wrong from the second step on."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    return load_state_dict


def _only_given_states(_: Callable[..., Any]) -> Callable[..., Any]:
    """Copy only the given tensors, under `no_grad`. The original indexes them with every key of Adam's state, including `step`
    (KeyError), and copies into a leaf outside `no_grad` (RuntimeError)."""

    @torch.no_grad()
    def _set_main_param_and_optimizer_states(self: Any, model_param: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        state = self.optimizer.state[main]
        for name, value in tensors.items():
            if name != "step":
                (main if name == "param" else state[name]).copy_(value)

    return _set_main_param_and_optimizer_states
