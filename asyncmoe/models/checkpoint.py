"""Hugging Face's layout: every tensor whole, under the name it has in the safetensors files (transformers' save_pretrained)."""

from __future__ import annotations

from asyncmoe.models.shape import Shape, tensors
from asyncmoe.reshard.layout import LayoutBuilder, RankLayout, whole

_TOP = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "router": "mlp.gate",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def hf_layout(m: Shape, dtype: str) -> RankLayout:
    """The checkpoint on disk, as rank 0."""
    builder = LayoutBuilder(0, dtype)
    for tensor, shape in tensors(m).items():
        builder.stack(hf_name(tensor), [(tensor, whole(shape))])
    return builder.build()


def hf_name(tensor: str) -> str:
    """On-disk name of a canonical tensor."""
    if tensor in _TOP:
        return _TOP[tensor]
    _, layer, *rest = tensor.split(".")
    inner = f"mlp.experts.{rest[1]}.{rest[2]}_proj" if rest[0] == "experts" else _IN_LAYER[rest[0]]
    return f"model.layers.{layer}.{inner}.weight"
