"""Configurations of published models, only the keys read here. DeepSeek-V3's and Kimi-K2's also declare float8 weights."""

from __future__ import annotations

from typing import Any

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu",
}  # fmt: skip
_YARN: dict[str, Any] = {
    "type": "yarn", "original_max_position_embeddings": 4096, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
_GLM: dict[str, Any] = {
    "model_type": "glm4_moe", "vocab_size": 151552, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "partial_rotary_factor": 0.5,
    "attention_bias": True, "rope_theta": 1000000, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
}  # fmt: skip

FLOAT8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
"""`quantization_config` of DeepSeek-V3 and Kimi-K2, omitted from `REAL`."""
REAL: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {
        **_QWEN3, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "moe_intermediate_size": 768,
        "intermediate_size": 6144,
    },
    "Qwen3-235B-A22B": {
        **_QWEN3, "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "moe_intermediate_size": 1536,
        "intermediate_size": 12288,
    },
    "DeepSeek-V3": {
        **_DEEPSEEK, "model_type": "deepseek_v3", "vocab_size": 129280, "num_attention_heads": 128, "num_key_value_heads": 128,
        "n_routed_experts": 256, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
        "rope_theta": 10000, "rope_scaling": {**_YARN, "factor": 40, "beta_fast": 32}, "num_nextn_predict_layers": 1,
    },
    "Kimi-K2": {
        **_DEEPSEEK, "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64,
        "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827,
        "rope_theta": 50000.0, "rope_scaling": {**_YARN, "factor": 32.0, "beta_fast": 1.0}, "num_nextn_predict_layers": 0,
    },
    "Moonlight-16B-A3B": {
        **_DEEPSEEK, "model_type": "deepseek_v3", "vocab_size": 163840, "hidden_size": 2048, "intermediate_size": 11264,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446, "q_lora_rank": None, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
        "max_position_embeddings": 8192, "num_nextn_predict_layers": 0,
    },
    "GLM-4.5": {
        **_GLM, "hidden_size": 5120, "num_hidden_layers": 92, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "n_routed_experts": 160, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "use_qk_norm": True,
    },
    "GLM-4.5-Air": {
        **_GLM, "hidden_size": 4096, "num_hidden_layers": 46, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "n_routed_experts": 128, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "use_qk_norm": False,
    },
    "Mixtral-8x22B": {
        "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56,
        "num_attention_heads": 48, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1000000,
        "rms_norm_eps": 1e-5, "sliding_window": None, "tie_word_embeddings": False,
    },
}  # fmt: skip
