"""A small model of every family. What is tried on all families is tried on these: a new family has one more entry here."""

from __future__ import annotations

from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 72,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "num_experts_per_tok": 2,
}
QWEN3_MOE: dict[str, Any] = {
    **_SIZES, "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 16, "norm_topk_prob": True, "mlp_only_layers": [1],
    "decoder_sparse_step": 1, "rope_theta": 10000.0,
}  # fmt: skip
QWEN3: dict[str, Any] = {key: value for key, value in QWEN3_MOE.items() if "experts" not in key and "moe" not in key} | {
    "model_type": "qwen3"
}

GLM4_MOE: dict[str, Any] = {
    **_SIZES, "model_type": "glm4_moe", "head_dim": 8, "n_routed_experts": 8, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "attention_bias": True, "use_qk_norm": True,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    **_SIZES, "model_type": "deepseek_v3", "num_key_value_heads": 8, "n_routed_experts": 8, "moe_intermediate_size": 16,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "q_lora_rank": 10,
    "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.8, "mscale_all_dim": 1.0,
    },
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": QWEN3,
    "qwen3-tied": {**QWEN3, "tie_word_embeddings": True},
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe-tied": {**QWEN3_MOE, "tie_word_embeddings": True},
    "deepseek_v3": DEEPSEEK_V3,
    "moonlight": {
        **DEEPSEEK_V3, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    },
    "glm4_moe": GLM4_MOE,
    "glm4_moe-air": {**GLM4_MOE, "use_qk_norm": False, "attention_bias": False, "n_shared_experts": 2, "first_k_dense_replace": 0},
    "mixtral": {**_SIZES, "model_type": "mixtral", "hidden_size": 32, "head_dim": 4, "intermediate_size": 16, "num_local_experts": 8},
}  # fmt: skip
