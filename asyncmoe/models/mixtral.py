"""Mixtral: grouped-query attention without query and key norms, top-k softmax routing in every layer."""

from __future__ import annotations

from asyncmoe.models.attention import Grouped
from asyncmoe.models.checks import Wanted, several_experts
from asyncmoe.models.config_keys import ALL
from asyncmoe.models.family import Family
from asyncmoe.models.sglang import EngineClass
from asyncmoe.models.shape import HfConfig, Shape, decoder, positive

_MOE = "block_sparse_moe"


def _shape_of(hf: HfConfig) -> Shape:
    return decoder(
        hf,
        Grouped(qk_norm=False, theta=1e6),
        experts=positive(hf, "num_local_experts", "num_experts"),
        expert_width=positive(hf, "intermediate_size"),
        experts_per_token=positive(hf, "num_experts_per_tok"),
        dense_layers=frozenset(),
        expert_names=(f"{_MOE}.experts", "w1", "w3", "w2"),
    )


def _features(hf: HfConfig) -> list[Wanted]:
    """Return the restrictions of SGLang's class: an untied output layer, and heads of hidden_size / num_attention_heads dimensions."""
    hidden, heads = positive(hf, "hidden_size"), positive(hf, "num_attention_heads")
    head_dim = hidden // heads
    return [
        several_experts(hf),
        ("hidden_size", hidden, (head_dim * heads,)),
        ("head_dim", hf.get("head_dim") or head_dim, (head_dim,)),
        ("tie_word_embeddings", bool(hf.get("tie_word_embeddings")), (False,)),
        ("sliding_window", hf.get("sliding_window"), (None,)),
        ("router_jitter_noise", hf.get("router_jitter_noise") or 0, (0,)),
    ]


FAMILY = Family(
    name="mixtral",
    shape_of=_shape_of,
    features=_features,
    # Renormalized top-k of a softmax over all experts equals a softmax over the chosen ones, which is Megatron's post-softmax.
    router=lambda hf: {"moe_router_score_function": "softmax", "moe_router_pre_softmax": False},
    engine=EngineClass(shares_tied_head=False, experts=_MOE),
    hf_names={"router": f"{_MOE}.gate.weight"},
    keys={
        **ALL, "num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "sliding_window": None,
        "router_jitter_noise": 0.0,
    },
)  # fmt: skip
