"""Checkpoints of float8 in blocks, quantised by SGLang's own code, which is taken out of its package: that wants a GPU."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncmoe.models import family_of
from asyncmoe.models.quantised import quantised

QUANTISATION = Path(__file__).parents[1] / ".venv-engine/lib/python3.11/site-packages/sglang/srt/layers/quantization"
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SCALE = "_scale_inv"


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
    folder.mkdir()
    hf = json.loads((plain / "config.json").read_text())
    weights = quantised_weights(hf, load_file(plain / "model.safetensors"))
    for file in plain.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps({**hf, "quantization_config": CONFIG}))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def write_plain(like: Path, folder: Path, weights: Mapping[str, torch.Tensor]) -> Path:
    """A checkpoint of other weights."""
    folder.mkdir()
    for file in like.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
