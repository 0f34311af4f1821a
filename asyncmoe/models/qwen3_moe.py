"""Qwen3-MoE: grouped-query attention with query and key norms, top-k softmax routing, no shared expert."""

from __future__ import annotations

from typing import Any

from asyncmoe.models.attention import Grouped
from asyncmoe.models.checks import Wanted, several_experts
from asyncmoe.models.family import Family
from asyncmoe.models.qwen3 import KEYS
from asyncmoe.models.sglang import EngineClass
from asyncmoe.models.shape import HfConfig, Shape, decoder, positive


def _shape_of(hf: HfConfig) -> Shape:
    return decoder(
        hf,
        Grouped(),
        experts=positive(hf, "num_experts", "num_local_experts"),
        expert_width=positive(hf, "moe_intermediate_size"),
        experts_per_token=positive(hf, "num_experts_per_tok"),
        dense_layers=_dense_layers(hf),
    )


def _dense_layers(hf: HfConfig) -> frozenset[int]:
    """Return the layers without experts, as Qwen3MoeDecoderLayer.__init__ of transformers determines them."""
    layers = positive(hf, "num_hidden_layers")
    only_dense = set(hf.get("mlp_only_layers") or ())
    return frozenset(i for i in range(layers) if i in only_dense or (i + 1) % hf.get("decoder_sparse_step", 1))


def _features(hf: HfConfig) -> list[Wanted]:
    """Return the restrictions of SGLang's class: it neither shares nor loads a tied output layer, and has experts in every layer."""
    return [
        *([several_experts(hf)] if hf.get("norm_topk_prob") else []),
        ("tie_word_embeddings", bool(hf.get("tie_word_embeddings")), (False,)),
        ("layers without experts (mlp_only_layers, decoder_sparse_step)", sorted(_dense_layers(hf)), ([],)),
    ]


def _router(hf: HfConfig) -> dict[str, Any]:
    """Return Megatron's post-softmax for renormalized top-k of a softmax over all experts, which equals a softmax over the chosen ones."""
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not hf.get("norm_topk_prob")}


FAMILY = Family(
    name="qwen3_moe",
    shape_of=_shape_of,
    features=_features,
    router=_router,
    engine=EngineClass(shares_tied_head=False, dp_attention=True),
    keys={**KEYS, "num_key_value_heads": 4, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None},
)
