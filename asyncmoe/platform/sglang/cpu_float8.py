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
from asyncmoe.platform.sglang.patching import PatchTargetGone, after_import

METHODS = "sglang.srt.layers.quantization.fp8"
LATENT = "sglang.srt.models.deepseek_common.deepseek_weight_loader"
_BLOCK = [128, 128]


def install() -> None:
    """Patch the modules as soon as they are imported."""
    after_import(METHODS, _methods)
    after_import(LATENT, _latent)


def _methods(module: ModuleType) -> None:
    linear, experts = getattr(module, "Fp8LinearMethod", None), getattr(module, "Fp8MoEMethod", None)
    wanted = ("apply", "process_weights_after_loading")
    if not all(hasattr(method, name) for method in (linear, experts) for name in wanted) or not hasattr(experts, "create_moe_runner"):
        raise PatchTargetGone(f"{module.__name__}.Fp8LinearMethod or Fp8MoEMethod is not what it was")
    if not hasattr(getattr(module, "Fp8Config", None), "get_supported_act_dtypes"):
        raise PatchTargetGone(f"{module.__name__}.Fp8Config.get_supported_act_dtypes is gone")
    # Dequantised weights support computation in any dtype, unlike SGLang's kernels.
    vars(module)["Fp8Config"].get_supported_act_dtypes = classmethod(lambda _: [torch.float32, torch.bfloat16, torch.float16])
    for method in (vars(module)["Fp8LinearMethod"], vars(module)["Fp8MoEMethod"]):
        method.process_weights_after_loading = _as_loaded
    vars(module)["Fp8LinearMethod"].apply = _linear
    vars(module)["Fp8MoEMethod"].create_moe_runner = _create_moe_runner
    vars(module)["Fp8MoEMethod"].apply = _experts


def _as_loaded(self: Any, layer: Any) -> None:
    if self.weight_block_size != _BLOCK:
        raise NotImplementedError(f"float8 without CUDA: got weight_block_size {self.weight_block_size}, expected {_BLOCK}")
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
    if not hasattr(module, "block_quant_to_tensor_quant"):
        raise PatchTargetGone(f"{module.__name__}.block_quant_to_tensor_quant is gone")
    dtypes: list[torch.dtype] = []

    def in_the_models_dtype(weight: torch.Tensor, scales: torch.Tensor, _: list[int]) -> tuple[torch.Tensor, None]:
        # During a model's first load, torch's default dtype is the model's.
        dtypes.append(torch.get_default_dtype())
        return dequantised(weight, scales, dtypes[0]), None

    vars(module)["block_quant_to_tensor_quant"] = in_the_models_dtype
