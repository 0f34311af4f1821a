"""A tiny random model of every family on disk, as transformers saves it, with the tokenizer of `asyncmoe.models.make`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncmoe.models.make import VOCAB, _write_tokenizer

CONTEXT = 512
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_SIGMOID: dict[str, Any] = {
    **_SIZES, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    **_SIGMOID, "model_type": "deepseek_v3", "num_key_value_heads": 4, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {**_SIZES, "model_type": "mixtral", "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2},
    "glm": {
        **_SIGMOID, "model_type": "glm4_moe", "head_dim": 32, "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5,
    },
    "deepseek": _DEEPSEEK,
    "moonlight": {
        **_DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    },
}  # fmt: skip

ELSEWHERE = {
    "qwen3": "tests/engine/test_direct.py",
    "qwen3_moe": "what `asyncmoe.models.make` makes, in all other tests of engines and runs",
}
"""Families that are not here, and where they meet an engine."""


def write(folder: Path, name: str) -> Path:
    """Write one of `MODELS` into `folder`, in float32; the biases that routers choose by are as large as to matter."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {key: value for key, value in MODELS[name].items() if key != "model_type"}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(MODELS[name]["model_type"], **sizes))
        for key, value in (*model.named_parameters(), *model.named_buffers()):
            if "correction_bias" in key:
                value.normal_(std=0.1)
            elif "norm" in key:
                value.copy_(1 + 0.2 * torch.randn_like(value))
            elif "inv_freq" not in key:
                value.add_(0.05 * torch.randn_like(value))
        model.save_pretrained(folder)
    _write_tokenizer(folder, CONTEXT)
    return folder
