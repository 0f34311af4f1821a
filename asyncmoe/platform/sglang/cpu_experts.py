"""Patch for expert parallelism in an engine (--ep-size) on a machine without CUDA; see `cpu`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


def native(module: ModuleType) -> None:
    """Pass `moe_forward_native` only the choices of this rank's experts, each as a token with one expert, because it counts tokens by
    expert number, and other ranks' experts have number -1."""
    original = vars(module)["moe_forward_native"]

    def moe_forward_native(layer: Any, x: torch.Tensor, topk_output: Any, moe_runner_config: Any) -> torch.Tensor:
        token, choice = torch.where(topk_output.topk_ids >= 0)
        if len(token) == topk_output.topk_ids.numel():
            whole: torch.Tensor = original(layer, x, topk_output, moe_runner_config)
            return whole
        output = torch.zeros_like(x, dtype=torch.float32)
        if len(token):
            weights, ids = (part[token, choice, None] for part in (topk_output.topk_weights, topk_output.topk_ids))
            here = topk_output._replace(topk_weights=weights, topk_ids=ids)
            output.index_add_(0, token, original(layer, x[token], here, moe_runner_config).float())
        return output.to(x.dtype)

    vars(module)["moe_forward_native"] = moe_forward_native


PATCHES = {"sglang.srt.layers.moe.fused_moe_native": native}
