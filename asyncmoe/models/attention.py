"""The interface of a kind of attention (its tensors, and their places in the three layouts), and grouped-query attention.

Source: megatron/core 0.16 (transformer/attention.py), sglang 0.5.23 (layers/linear.py, `QKVParallelLinear`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asyncmoe.config.lora import GROUPED
from asyncmoe.errors import ConfigError
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.models.shape import HfConfig, Shape, Shapes, positive, rope
from asyncmoe.models.shards import put_columns, put_whole, shard
from asyncmoe.reshard.layout import Box, LayoutBuilder, rows

_BIASED = ("q", "k", "v")


@dataclass(frozen=True)
class Grouped:
    """Grouped-query attention: the queries of a group share a key and a value.

    Attributes:
        qk_norm: queries and keys are normalized per head.
        bias: q, k and v have biases.
        rotary: share of a head's dimensions that are rotated.
        theta: rope_theta for a configuration without one.
    """

    qk_norm: bool = True
    bias: bool = False
    rotary: float = 1.0
    theta: float = 10000.0

    @property
    def hf_names(self) -> Mapping[str, str]:
        names = {tensor: f"self_attn.{tensor}_proj.weight" for tensor in ("q", "k", "v", "o")}
        names |= {f"{tensor}_bias": f"self_attn.{tensor}_proj.bias" for tensor in _BIASED}
        return names | {norm: f"self_attn.{norm}.weight" for norm in ("q_norm", "k_norm")}

    @property
    def adapters(self) -> tuple[str, ...]:
        return GROUPED

    def check(self, m: Shape) -> None:
        if m.heads % m.kv_heads:
            expected = f"a multiple of num_key_value_heads = {m.kv_heads}"
            raise ConfigError("num_attention_heads in config.json", got=m.heads, expected=expected)
        turning = m.head_dim * self.rotary
        if turning % 2:
            share = f", of which a share of {self.rotary:g} rotates" if self.rotary != 1 else ""
            raise ConfigError("head_dim in config.json", got=f"{m.head_dim}{share}", expected="an even number of dimensions that rotate")

    def shapes(self, m: Shape) -> Shapes:
        q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
        found: Shapes = {"q": (q, m.hidden), "k": (kv, m.hidden), "v": (kv, m.hidden), "o": (m.hidden, q)}
        if self.bias:
            found |= {f"{tensor}_bias": found[tensor][:1] for tensor in _BIASED}
        return found | ({"q_norm": (m.head_dim,), "k_norm": (m.head_dim,)} if self.qk_norm else {})

    def put_megatron(self, builder: LayoutBuilder, m: Shape, parallel: MegatronParallel) -> None:
        shapes, (tp, tp_rank) = self.shapes(m), (parallel.tp, parallel.tp_rank(builder.rank))
        norm = "self_attention.linear_qkv.layer_norm_weight" if parallel.te else "input_layernorm.weight"
        put_whole(builder, {"attn_norm": (m.hidden,)}, norm, "attn_norm")
        groups = shard(m.kv_heads, tp, tp_rank)
        builder.stack("self_attention.linear_qkv.weight", list(_by_group(m, shapes, "", *groups)))
        if self.bias:
            builder.stack("self_attention.linear_qkv.bias", list(_by_group(m, shapes, "_bias", *groups)))
        for part in ("q", "k") if self.qk_norm else ():
            put_whole(builder, shapes, f"self_attention.{part}_layernorm.weight", f"{part}_norm")
        put_columns(builder, shapes, "self_attention.linear_proj.weight", "o", tp, tp_rank)

    def put_sglang(self, builder: LayoutBuilder, m: Shape, parallel: EngineParallel) -> None:
        shapes, (tp, rank) = self.shapes(m), parallel.attn_place(builder.rank)
        builder.stack("self_attn.qkv_proj.weight", _stacked(m, shapes, "", tp, rank))
        if self.bias:
            builder.stack("self_attn.qkv_proj.bias", _stacked(m, shapes, "_bias", tp, rank))
        put_columns(builder, shapes, "self_attn.o_proj.weight", "o", tp, rank)
        for part in ("q_norm", "k_norm") if self.qk_norm else ():
            put_whole(builder, shapes, f"self_attn.{part}.weight", part)

    def transformer_arguments(self, hf: HfConfig, m: Shape) -> dict[str, Any]:
        return {"num_query_groups": m.kv_heads, "kv_channels": m.head_dim, "qk_layernorm": self.qk_norm, "add_qkv_bias": self.bias}

    def gpt_arguments(self, hf: HfConfig) -> dict[str, Any]:
        turned = rope(hf, self.theta)
        scaled = {"rope_scaling": True, "rope_scaling_factor": float(positive(turned, "factor"))} if turned["rope_type"] == "llama3" else {}
        return {"position_embedding_type": "rope", "rotary_base": turned["rope_theta"], "rotary_percent": self.rotary, **scaled}


def _by_group(m: Shape, shapes: Shapes, suffix: str, first: int, count: int) -> Iterator[tuple[str, Box]]:
    """Yield the rows of linear_qkv: for each query group its query heads, its key head, its value head."""
    d, r = m.head_dim, m.heads_per_group
    for group in range(first, first + count):
        for tensor, heads in (("q", r), ("k", 1), ("v", 1)):
            yield tensor + suffix, rows(shapes[tensor + suffix], group * heads * d, heads * d)


def _stacked(m: Shape, shapes: Shapes, suffix: str, tp: int, rank: int) -> list[tuple[str, Box]]:
    """Return the rank's query heads, then its key heads, then its value heads; if ranks outnumber key heads, neighbours share one."""
    d = m.head_dim
    kv_first, kv_count = shard(m.kv_heads, tp, rank) if m.kv_heads >= tp else (rank // (tp // m.kv_heads), 1)
    parts = {"q": shard(m.heads, tp, rank), "k": (kv_first, kv_count), "v": (kv_first, kv_count)}
    return [(part + suffix, rows(shapes[part + suffix], first * d, count * d)) for part, (first, count) in parts.items()]
