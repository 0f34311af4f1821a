"""Multi-head latent attention: keys and values of all heads are computed from one compressed vector per token; optionally, so are queries.

Each head has a part without position and a rotary part, whose key all heads share. The norms of the compressed vectors use the model's
eps, as in SGLang, so that the trained model equals the sampled one. transformers always uses 1e-6.

Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1); transformer/multi_latent_attention.py and models/gpt/gpt_layer_specs.py of
megatron/core 0.16; `DeepseekV3Attention` of transformers; `DeepseekV2AttentionMLA` of sglang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncmoe.config.lora import LATENT
from asyncmoe.errors import ConfigError
from asyncmoe.models.checks import Wanted
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.models.shape import HfConfig, Shape, Shapes, positive, rope
from asyncmoe.models.shards import put_columns, put_rows, put_whole
from asyncmoe.reshard.layout import LayoutBuilder, whole

_HF = {"q": "q_proj", "q_a": "q_a_proj", "q_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa", "kv_b": "kv_b_proj", "o": "o_proj"}
_HF_NORMS = {"q_norm": "q_a_layernorm", "kv_norm": "kv_a_layernorm"}


@dataclass(frozen=True)
class Latent:
    """The sizes of latent attention.

    Attributes:
        q_rank, kv_rank: entries of the compressed vectors; q_rank None: queries are computed directly from the hidden state.
        nope, rope: a head's dimensions without position, and its rotary dimensions.
        value: dimensions of a head's value.
    """

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int

    @property
    def hf_names(self) -> Mapping[str, str]:
        return {tensor: f"self_attn.{name}.weight" for tensor, name in (_HF | _HF_NORMS).items()}

    @property
    def adapters(self) -> tuple[str, ...]:
        """Linear layers that can have an adapter. If q_rank is None, q_proj and kv_a_proj_with_mqa cannot: SGLang looks for adapters of
        q_proj in qkv_proj, and supports kv_a_proj_with_mqa only fused with q_a_proj (`get_normalized_target_modules` of lora/utils.py)."""
        return LATENT if self.q_rank is not None else ("kv_b_proj", "o_proj")

    def check(self, m: Shape) -> None:
        if self.rope % 2:
            raise ConfigError("qk_rope_head_dim in config.json", got=self.rope, expected="an even number of dimensions that rotate")

    def shapes(self, m: Shape) -> Shapes:
        q, kv = m.heads * (self.nope + self.rope), m.heads * (self.nope + self.value)
        found: Shapes = {"q": (q, m.hidden)}
        if self.q_rank is not None:
            found = {"q_a": (self.q_rank, m.hidden)}
        found |= {"kv_a": (self.kv_rank + self.rope, m.hidden), "kv_norm": (self.kv_rank,), "kv_b": (kv, self.kv_rank)}
        if self.q_rank is not None:
            found |= {"q_norm": (self.q_rank,), "q_b": (q, self.q_rank)}
        return found | {"o": (m.hidden, m.heads * self.value)}

    def put_megatron(self, builder: LayoutBuilder, m: Shape, parallel: MegatronParallel) -> None:
        """Add the storages of a trainer rank. The down-projections are whole on every rank, as with Transformer Engine and in
        `asyncmoe.platform.megatron.local_layers`."""
        shapes, place = self.shapes(m), (parallel.tp, parallel.tp_rank(builder.rank))
        put_whole(builder, {"attn_norm": (m.hidden,)}, "input_layernorm.weight", "attn_norm")
        for part in ("q", "kv"):
            if f"{part}_a" not in shapes:
                put_rows(builder, shapes, "self_attention.linear_q_proj.weight", "q", *place)
                continue
            put_whole(builder, shapes, f"self_attention.linear_{part}_down_proj.weight", f"{part}_a")
            norm = f"linear_{part}_up_proj.layer_norm_weight" if parallel.te else f"{part}_layernorm.weight"
            put_whole(builder, shapes, f"self_attention.{norm}", f"{part}_norm")
            put_rows(builder, shapes, f"self_attention.linear_{part}_up_proj.weight", f"{part}_b", *place)
        put_columns(builder, shapes, "self_attention.linear_proj.weight", "o", *place)

    def put_sglang(self, builder: LayoutBuilder, m: Shape, parallel: EngineParallel) -> None:
        """Add parameters only: SGLang derives `w_kc` and `w_vc` from kv_b_proj again after an update (`weight_buffers.py` of the
        receiver)."""
        shapes, place = self.shapes(m), parallel.attn_place(builder.rank)
        if self.q_rank is None:
            put_rows(builder, shapes, "self_attn.q_proj.weight", "q", *place)
            put_whole(builder, shapes, "self_attn.kv_a_proj_with_mqa.weight", "kv_a")
        else:
            both = [(tensor, whole(shapes[tensor])) for tensor in ("q_a", "kv_a")]
            builder.stack("self_attn.fused_qkv_a_proj_with_mqa.weight", both)
            put_whole(builder, shapes, "self_attn.q_a_layernorm.weight", "q_norm")
            put_rows(builder, shapes, "self_attn.q_b_proj.weight", "q_b", *place)
        put_rows(builder, shapes, "self_attn.kv_b_proj.weight", "kv_b", *place)
        put_columns(builder, shapes, "self_attn.o_proj.weight", "o", *place)
        put_whole(builder, shapes, "self_attn.kv_a_layernorm.weight", "kv_norm")

    def transformer_arguments(self, hf: HfConfig, m: Shape) -> dict[str, Any]:
        return {
            "multi_latent_attention": True,
            "num_query_groups": m.heads,
            "kv_channels": self.nope + self.rope,
            "qk_layernorm": True,
            "add_qkv_bias": False,
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.kv_rank,
            "qk_head_dim": self.nope,
            "qk_pos_emb_head_dim": self.rope,
            "v_head_dim": self.value,
            "rotary_base": rope(hf)["rope_theta"],
            **_scaling(hf),
        }

    def gpt_arguments(self, hf: HfConfig) -> dict[str, Any]:
        return {"position_embedding_type": "rope"}


def latent(hf: HfConfig) -> Latent:
    """Read the sizes from a configuration.

    Raises:
        ConfigError: a key is missing.
    """
    return Latent(
        q_rank=None if hf.get("q_lora_rank") is None else positive(hf, "q_lora_rank"),
        kv_rank=positive(hf, "kv_lora_rank"),
        nope=positive(hf, "qk_nope_head_dim"),
        rope=positive(hf, "qk_rope_head_dim"),
        value=positive(hf, "v_head_dim"),
    )


def head_dims(m: Shape) -> tuple[int, int]:
    """Return the dimensions of a head's key and value, in a model with any kind of attention."""
    kind = m.attention
    return (kind.nope + kind.rope, kind.value) if isinstance(kind, Latent) else (m.head_dim, m.head_dim)


def features(hf: HfConfig) -> list[Wanted]:
    """Return restrictions for features that Megatron and transformers compute differently.

    Raises:
        ConfigError: a number for scaled positions is missing.
    """
    heads, scaling = positive(hf, "num_attention_heads"), rope(hf)
    found: list[Wanted] = [
        ("num_key_value_heads", hf.get("num_key_value_heads") or heads, (heads,)),
        ("rope_interleave", hf.get("rope_interleave", True), (True,)),
        ("rope_parameters.rope_type", scaling["rope_type"], ("default", "yarn")),
    ]
    if scaling["rope_type"] == "yarn":
        one = bool(scaling.get("mscale")) != bool(scaling.get("mscale_all_dim"))
        found += [
            ("rope_parameters.attention_factor", scaling.get("attention_factor"), (None,)),
            ("rope_parameters.truncate", scaling.get("truncate", True), (True,)),
            ("rope_parameters.mscale and mscale_all_dim", "one" if one else "both or neither", ("both or neither",)),
        ]
        positive(scaling, "original_max_position_embeddings")
        positive(scaling, "factor")
    return found


def _scaling(hf: HfConfig) -> dict[str, Any]:
    """Return the position scaling explicitly, because Megatron's default factor of 40 scales the softmax even for unscaled positions."""
    scaling = rope(hf)
    if scaling["rope_type"] != "yarn":
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(scaling["factor"]),
        "original_max_position_embeddings": scaling["original_max_position_embeddings"],
        "beta_fast": float(scaling.get("beta_fast") or 32),
        "beta_slow": float(scaling.get("beta_slow") or 1),
        "mscale": float(scaling.get("mscale") or 1),
        "mscale_all_dim": float(scaling.get("mscale_all_dim") or 0),
    }
