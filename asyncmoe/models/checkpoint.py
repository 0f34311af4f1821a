"""Hugging Face's layout: every tensor whole, under its name in the safetensors files (transformers' save_pretrained)."""

from __future__ import annotations

from collections.abc import Mapping

from asyncmoe.models.shape import Shape, tensors
from asyncmoe.models.shards import dtype_of
from asyncmoe.reshard.layout import LayoutBuilder, RankLayout, whole

_TOP = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
_PARTS = ("gate", "up", "down")
_IN_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "router": "mlp.gate.weight",
    "router_bias": "mlp.gate.e_score_correction_bias",
    **{part: f"mlp.{part}_proj.weight" for part in _PARTS},
    **{f"shared.{part}": f"mlp.shared_experts.{part}_proj.weight" for part in _PARTS},
}
"""Tensor names within a layer in most families."""


def hf_layout(m: Shape, own: Mapping[str, str], dtype: str) -> RankLayout:
    """Return the layout of the checkpoint on disk, as rank 0.

    Args:
        own: the family's names of tensors in a layer, where they differ from the common ones.
    """
    front, *parts = m.expert_names
    experts = {f"experts.{part}": f"{front}.{{}}.{name}.weight" for part, name in zip(_PARTS, parts, strict=True)}
    names = {**_IN_LAYER, **experts, **m.attention.hf_names, **own}
    builder = LayoutBuilder(0, dtype)
    for tensor, shape in tensors(m).items():
        builder.stack(_name(tensor, names), [(tensor, whole(shape))], dtype_of(m, tensor.split(".", 2)[-1]))
    return builder.build()


def _name(tensor: str, names: Mapping[str, str]) -> str:
    """Return the name on disk of a canonical tensor. `names`: names on disk by tensor within a layer; {} stands for an expert's number."""
    if tensor in _TOP:
        return _TOP[tensor]
    _, layer, inner = tensor.split(".", 2)
    if inner.startswith("experts."):
        _, expert, part = inner.split(".")
        return f"model.layers.{layer}.{names[f'experts.{part}'].format(expert)}"
    return f"model.layers.{layer}.{names[inner]}"
