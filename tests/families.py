"""A small model of every family. What is tried on all families is tried on these, in the sizes of each kind of test: a new family has one
more entry here, and is then tried in layouts, on Megatron's ranks, in memory arithmetic, in engines and in whole runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncmoe.models.make import VOCAB, write_tokenizer

_SIGMOID: dict[str, Any] = {
    "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    **_SIGMOID, "model_type": "deepseek_v3", "num_key_value_heads": None, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4,
    "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 14, "qk_rope_head_dim": 8, "v_head_dim": 18,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.7, "mscale_all_dim": 1.0,
    },
}  # fmt: skip

PLAIN = {"rope_type": "default", "rope_theta": 1e5}
DENSE = ("qwen3", "llama")
"""Families without experts."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        # With heads of 8 dimensions each of the four frequencies is scaled differently: two not at all, one in part, one by the factor.
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32},  # which is not hidden / heads
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 32, "num_experts": 8, "norm_topk_prob": True, "decoder_sparse_step": 1},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8},
    "glm": {
        **_SIGMOID, "model_type": "glm4_moe", "head_dim": 32, "n_group": 1, "topk_group": 1, "attention_bias": True, "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
    "deepseek": _DEEPSEEK,
    "moonlight": {
        **_DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    },
}  # fmt: skip
"""What is a model's own; None: as many key heads as heads."""

CONTEXT = 512
ENGINE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_experts_per_tok": 2, "max_position_embeddings": CONTEXT, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Sizes for engines and whole runs. SGLang on a CPU pads what is not 32 wide on each rank, and key heads that ranks share: with these
it need not, up to four ranks."""


def sized(sizes: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A model of `MODELS` in the sizes of a kind of test; it takes what its family knows."""
    model = {**sizes, **MODELS[name]}
    if "rope_parameters" in model:
        model.pop("rope_theta", None)
    if model["num_key_value_heads"] is None:
        model["num_key_value_heads"] = model["num_attention_heads"]
    if model["model_type"] in DENSE:
        return {key: value for key, value in model.items() if "expert" not in key and "moe" not in key}
    if model["model_type"] == "mixtral":
        model["intermediate_size"] = model.pop("moe_intermediate_size")
    return model


def write(folder: Path, name: str) -> Path:
    """Write one of `MODELS` in the sizes for engines."""
    values = sized(ENGINE, name)
    return write_random(folder, values.pop("model_type"), values)


def write_random(folder: Path, kind: str, values: Mapping[str, Any]) -> Path:
    """Write a model as transformers saves it, random and in float32, with the tokenizer of `asyncmoe.models.make`; the biases that routers
    choose by are as large as to matter."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values))
        for key, value in (*model.named_parameters(), *model.named_buffers()):
            if "correction_bias" in key:
                value.normal_(std=0.1)
            elif "norm" in key:
                value.copy_(1 + 0.2 * torch.randn_like(value))
            elif "inv_freq" not in key:
                value.add_(0.05 * torch.randn_like(value))
        model.save_pretrained(folder)
    write_tokenizer(folder, CONTEXT)
    return folder


def rewrite(like: Path, folder: Path, weights: Mapping[str, Any]) -> Path:
    """Write a checkpoint of other weights, all in one file, with the other files of one that is there."""
    from safetensors.torch import save_file

    folder.mkdir()
    for file in like.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_dense(folder: Path, name: str, **changes: Any) -> Path:
    """Write a dense model of `MODELS` with changed settings, and unscaled rotary frequencies, as Mixtral's and GLM's always are."""
    write(folder, name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": PLAIN, **changes}))
    return folder


def routers(model: Any) -> dict[int, Any]:
    """The routers of a transformers model, by layer."""
    return {i: layer.mlp.gate for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")}


@contextmanager
def hooked(gates: Iterable[Any], hook: Callable[[int, Any, Any], Any]) -> Iterator[None]:
    """Call `hook` with the number of a router among these, itself, and (logits, weights, experts) of each of its passes; what it returns,
    if anything, takes their place."""
    handles = [gate.register_forward_hook(lambda gate, _, out, number=n: hook(number, gate, out)) for n, gate in enumerate(gates)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def with_one_eps(model: Any) -> Any:
    """A transformers model whose norms all have the eps of its configuration, as SGLang and Megatron compute it.

    `DeepseekV3Attention` of transformers builds the norms of the small vectors without it: they have 1e-6, also in a model of 1e-5 such as
    Moonlight. Of other published models nothing is changed by this.
    """
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")) and hasattr(module, "variance_epsilon"):
            module.variance_epsilon = model.config.rms_norm_eps
    return model
