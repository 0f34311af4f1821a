"""Patches for adapters in an engine (--enable-lora) on a machine without CUDA; see `cpu`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F


class _Unpinned:
    """A view of torch that ignores the argument pin_memory, because page-locked memory needs CUDA."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("tensor", "zeros", "empty", "full", "arange"):
            return found
        return lambda *args, pin_memory=False, **kwargs: found(*args, **kwargs)


def _unpin(module: ModuleType) -> None:
    """Replace torch in a module that allocates small tensors in page-locked memory on every device."""
    vars(module)["torch"] = _Unpinned()


def _lengthen(module: ModuleType) -> None:
    """Let a segment be as long as the batch. The torch backend joins the requests of one adapter into a segment, but SGLang 0.5.23 checks
    its length against the longest request's: more than 256 tokens of short prompts at once end the server."""
    counts = vars(module)["get_batch_token_counts"]
    vars(module)["get_batch_token_counts"] = lambda batch: (counts(batch)[0],) * 2


def _patch_layers(module: ModuleType) -> None:
    """Replace the Triton kernels of experts with adapters (`lora_moe_runners`)."""
    _unpin(module)
    vars(module)["FusedMoEWithLoRA"]._forward_with_lora = _forward_with_lora


def _forward_with_lora(self: Any, hidden_states: torch.Tensor, topk_output: Any, lora_info: Any, **_: Any) -> Any:
    """Replace FusedMoEWithLoRA._forward_with_lora. As there, the model sums over tensor-parallel ranks. The model also applies the
    scaling factor of routed experts, as on CPU for experts without adapters (`DeepseekV2MoE.forward_normal`,
    `Glm4MoeSparseMoeBlock.forward_normal`)."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    layer = self.base_layer  # gated SiLU, weighted at its output, as in every family
    dispatched = layer.dispatcher.dispatch(hidden_states=hidden_states, topk_output=topk_output)
    weights, ids, _ = dispatched.topk_output
    info, x = lora_info, dispatched.hidden_states
    slots = info.token_lora_mapping[: len(x)] if info.has_active_lora else torch.full((len(x),), -1)
    output = adapted_experts(
        x,
        weights,
        ids,
        slots,
        (layer.w13_weight, info.gate_up_lora_a_weights, info.gate_up_lora_b_weights),
        (layer.w2_weight, info.down_lora_a_weights, info.down_lora_b_weights),
    )
    return layer.dispatcher.combine(combine_input=StandardCombineInput(hidden_states=output))


Adapted = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Weight [experts, out, in]; for each slot A [slots, experts or 1, parts * rank, in] and B [slots, experts or 1, out, rank]
times the scale. Parts are stacked layers (gate and up), which share `out` equally."""


def adapted_experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor, gate_up: Adapted, down: Adapted
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, [tokens, hidden].

    Args:
        x: [tokens, hidden].
        weights, ids: [tokens, experts per token]; id -1: an expert of another rank.
        slots: [tokens], the adapter slot of each token; -1: no adapter.
    """
    output = torch.zeros_like(x)
    for expert in sorted({*ids.flatten().tolist()} - {-1}):
        token, choice = torch.where(ids == expert)
        gate, up = _adapted(x[token], expert, slots[token], gate_up, parts=2).chunk(2, dim=-1)
        out = _adapted(F.silu(gate) * up, expert, slots[token], down, parts=1)
        output.index_add_(0, token, out * weights[token, choice, None].to(out.dtype))
    return output


def _adapted(x: torch.Tensor, expert: int, slots: torch.Tensor, layer: Adapted, parts: int) -> torch.Tensor:
    weight, all_a, all_b = layer
    y = F.linear(x, weight[expert])
    for slot in sorted({*slots.tolist()} - {-1}):
        here = slots == slot
        a, b = (half[slot, expert if half.shape[1] > 1 else 0] for half in (all_a, all_b))
        low = F.linear(x[here], a).chunk(parts, dim=-1)
        y[here] += torch.cat([F.linear(part, rows) for part, rows in zip(low, b.chunk(parts), strict=True)], dim=-1)
    return y


PATCHES = {
    "sglang.srt.lora.layers": _patch_layers,
    "sglang.srt.lora.backend.torch_backend": _unpin,
    "sglang.srt.lora.backend.base_backend": _lengthen,
}
