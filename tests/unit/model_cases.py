"""Small models for layouts, odd in every size: of every family, and of what occurs in some of its models only."""

from __future__ import annotations

from typing import Any

from tests import families

_SIZES: dict[str, Any] = {
    "vocab_size": 72,
    "hidden_size": 48,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "rope_theta": 10000.0,
}
QWEN3 = families.sized(_SIZES, "qwen3")
QWEN3_MOE = {**families.sized(_SIZES, "qwen3_moe"), "mlp_only_layers": [1]}

MODELS: dict[str, dict[str, Any]] = {
    **{name: families.sized(_SIZES, name) for name in families.MODELS},
    "qwen3_moe": QWEN3_MOE,
    "llama-tied": {**families.sized(_SIZES, "llama"), "tie_word_embeddings": True},
    "qwen3-tied": {**QWEN3, "tie_word_embeddings": True},
    "qwen3_moe-tied": {**QWEN3_MOE, "tie_word_embeddings": True},
    "glm-air": {
        **families.sized(_SIZES, "glm"), "use_qk_norm": False, "attention_bias": False, "n_shared_experts": 2, "first_k_dense_replace": 0,
    },
}  # fmt: skip
