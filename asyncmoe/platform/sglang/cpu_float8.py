"""Patches for block-scaled float8 weights in an engine on a machine without CUDA; see `cpu`.

Without CUDA SGLang supports such weights only through AMX, for which it packs them. The patches keep them as loaded and multiply them by
their scales in every forward pass, which is slow but exact up to the computation's dtype.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from asyncmoe.platform.float8 import dequantised


def _methods(module: ModuleType) -> None:
    linear, experts, config = (vars(module)[name] for name in ("Fp8LinearMethod", "Fp8MoEMethod", "Fp8Config"))
    # Dequantised weights support computation in any dtype, unlike SGLang's kernels.
    config.get_supported_act_dtypes = classmethod(lambda _: [torch.float32, torch.bfloat16, torch.float16])
    linear.process_weights_after_loading = experts.process_weights_after_loading = _as_loaded
    linear.apply, experts.apply = _linear, _experts
    experts.create_moe_runner = _create_moe_runner


def _as_loaded(self: Any, layer: Any) -> None:
    if hasattr(layer, "weight_scale_inv"):
        layer.input_scale = None


def _linear(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, dequantised(layer.weight, layer.weight_scale_inv, x.dtype), bias)


def _create_moe_runner(self: Any, layer: torch.nn.Module, moe_runner_config: Any) -> None:
    self.moe_runner_config = moe_runner_config


def _experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states
    plain = SimpleNamespace(
        num_experts=layer.num_experts,
        w13_weight=dequantised(layer.w13_weight, layer.w13_weight_scale_inv, x.dtype),
        w2_weight=dequantised(layer.w2_weight, layer.w2_weight_scale_inv, x.dtype),
    )
    return StandardCombineInput(hidden_states=moe_forward_native(plain, x, dispatch_output.topk_output, self.moe_runner_config))


def _latent(module: ModuleType) -> None:
    """Keep the weights derived for latent attention in the model's dtype, as on Hopper GPUs (bfloat16 there), because SGLang would quantise
    them again for an unavailable kernel."""
    dtypes: list[torch.dtype] = []

    def in_the_models_dtype(weight: torch.Tensor, scales: torch.Tensor, _: list[int]) -> tuple[torch.Tensor, None]:
        # During a model's first load, torch's default dtype is the model's.
        dtypes.append(torch.get_default_dtype())
        return dequantised(weight, scales, dtypes[0]), None

    vars(module)["block_quant_to_tensor_quant"] = in_the_models_dtype


PATCHES = {
    "sglang.srt.layers.quantization.fp8": _methods,
    "sglang.srt.models.deepseek_common.deepseek_weight_loader": _latent,
}
