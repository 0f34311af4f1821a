"""Checkpoints of float8 in blocks, quantised by SGLang's own code, which is taken out of its package: that wants a GPU."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncmoe.models import family_of
from asyncmoe.models.make import VOCAB
from asyncmoe.models.quantised import quantised
from benchmarks.published import FLOAT8 as CONFIG
from tests import families

QUANTISATION = Path(__file__).parents[1] / ".venv-engine/lib/python3.11/site-packages/sglang/srt/layers/quantization"
SCALE = "_scale_inv"
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "qwen3_moe": {**SIZES, "num_key_value_heads": 2, "head_dim": 128, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "deepseek_v3": {
        **SIZES, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 0,
        "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip
"""Of which every shard is whole blocks; the last block of DeepSeek's small vectors of keys is not."""


def plain_model(folder: Path, kind: str) -> Path:
    """A random model that is not quantised, with a tokenizer."""
    return families.write_random(folder, kind, MODELS[kind])


@cache
def sglang(file: str, *names: str) -> dict[str, Callable[..., Any]]:
    """Functions of one of its files; skips the test where SGLang is not installed."""
    path = QUANTISATION / file
    if not path.exists():
        pytest.skip("SGLang is not installed in .venv-engine")
    found = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef) and node.name in names]
    scope: dict[str, Any] = {"torch": torch, "Tuple": tuple, "List": list, "ceil_align": lambda n, step: -(-n // step) * step}
    exec(compile(ast.Module(found, []), str(path), "exec"), scope)
    return scope


def quantise(weights: torch.Tensor, *, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in float8, and float32[blocks of rows, blocks of columns]."""
    if power_of_two:
        made, scales = sglang("fp8_utils.py", "per_block_cast_to_fp8", "ceil_to_ue8m0")["per_block_cast_to_fp8"](weights)
    else:
        made, scales = sglang("mxfp8_block_convert.py", "bf16_to_block_fp8_128")["bf16_to_block_fp8_128"](weights)
    return made, scales


def quantised_weights(hf: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors as one of float8 has them."""
    family = family_of(hf)
    chosen = {piece.storage for piece in family.hf_layout(hf, "float32").pieces if quantised(piece.tensor)}
    made: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        made[name] = value
        if name in chosen:
            made[name], made[name + SCALE] = quantise(value)
    return made


def dequantised_weights(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What they stand for, in float32."""
    dequantise = sglang("fp8_utils.py", "block_quant_dequant")["block_quant_dequant"]
    return {
        name: dequantise(value, weights[name + SCALE], [128, 128], torch.float32) if value.dtype == torch.float8_e4m3fn else value
        for name, value in weights.items()
        if not name.endswith(SCALE)
    }


def write(plain: Path, folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of float8 of a plain one; its tensors."""
    hf = json.loads((plain / "config.json").read_text())
    weights = quantised_weights(hf, load_file(plain / "model.safetensors"))
    families.rewrite(plain, folder, weights)
    (folder / "config.json").write_text(json.dumps({**hf, "quantization_config": CONFIG}))
    return weights


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, however many files it has."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Bit for bit."""
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
