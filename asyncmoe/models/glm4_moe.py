"""GLM-4.5: grouped-query attention with partly rotary heads and biases, and query and key norms in the larger model; DeepSeek-V3's
experts in all layers except the first."""

from __future__ import annotations

from asyncmoe.models import sigmoid
from asyncmoe.models.attention import Grouped
from asyncmoe.models.checks import Wanted
from asyncmoe.models.config_keys import ALL
from asyncmoe.models.family import Family
from asyncmoe.models.sglang import EngineClass
from asyncmoe.models.shape import HfConfig, Shape, decoder, rope


def _shape_of(hf: HfConfig) -> Shape:
    return decoder(
        hf,
        Grouped(qk_norm=bool(hf.get("use_qk_norm")), bias=bool(hf.get("attention_bias")), rotary=_rotary(hf)),
        **sigmoid.sizes(hf),
        wide=frozenset({"router", "router_bias"}),  # SGLang's class holds both in float32
    )


def _rotary(hf: HfConfig) -> float:
    """Return the rotary share as Glm4MoeConfig of transformers does: a top-level key or, since version 5, one in rope_parameters."""
    return float(rope(hf).get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 0.5)


def _features(hf: HfConfig) -> list[Wanted]:
    return [
        *sigmoid.features(hf),
        ("attention_bias", bool(hf.get("attention_bias")), (False, True)),
        ("partial_rotary_factor", _rotary(hf), (_rotary(hf),)),
        ("tie_word_embeddings", bool(hf.get("tie_word_embeddings")), (False,)),
    ]


FAMILY = Family(
    name="glm4_moe",
    shape_of=_shape_of,
    features=_features,
    router=sigmoid.arguments,
    engine=EngineClass(shares_tied_head=False, dp_attention=True),
    keys={
        **ALL, "norm_topk_prob": True, "n_shared_experts": 1, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "use_qk_norm": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "moe_layer_freq": 1,
    },
)  # fmt: skip
