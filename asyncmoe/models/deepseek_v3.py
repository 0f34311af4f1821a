"""DeepSeek-V3: latent attention; after the first dense layers, experts with sigmoid scores, a selection bias and groups.

Kimi-K2 and Moonlight are configurations of DeepSeek-V3 without groups; Moonlight also has uncompressed queries and unscaled positions.
"""

from __future__ import annotations

import json
from typing import Any

from asyncmoe.models import latent, sigmoid
from asyncmoe.models.checks import Wanted
from asyncmoe.models.config_keys import ALL
from asyncmoe.models.family import Family
from asyncmoe.models.sglang import EngineClass
from asyncmoe.models.shape import HfConfig, Shape, decoder, positive

_UNSAID: dict[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
_TOLD = ("--json-model-override-args", json.dumps(_UNSAID))
"""Keys that config.json lacks because transformers' class fixes the behaviour; SGLang's class has no defaults for them."""


def _shape_of(hf: HfConfig) -> Shape:
    attention = latent.latent(hf)
    heads = {"num_key_value_heads": positive(hf, "num_attention_heads"), "head_dim": attention.nope + attention.rope}
    return decoder(
        {**hf, **heads},  # transformers writes different values under these keys, or none
        attention,
        **sigmoid.sizes(hf),
        wide=frozenset({"router_bias"}),
    )


def _features(hf: HfConfig) -> list[Wanted]:
    return [
        *sigmoid.features(hf),
        *latent.features(hf),
        *((key, hf.get(key, value), (value,)) for key, value in _UNSAID.items()),
        ("tie_word_embeddings", bool(hf.get("tie_word_embeddings")), (False,)),
    ]


FAMILY = Family(
    name="deepseek_v3",
    also=("kimi_k2",),
    shape_of=_shape_of,
    features=_features,
    router=sigmoid.arguments,
    engine=EngineClass(shares_tied_head=True, glued=("kv_a",), arguments=_TOLD, dp_attention=True),
    keys={
        **ALL, "norm_topk_prob": True, "n_shared_experts": 1, "num_key_value_heads": 128, "max_position_embeddings": 4096,
        "q_lora_rank": 1536, "rope_interleave": True, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
        "first_k_dense_replace": 3, **_UNSAID,
    },
)  # fmt: skip
