"""Write a GGUF file as a Hugging Face checkpoint, in bfloat16: python examples/real/from_gguf.py FILE OUT

transformers reads the file and dequantises its weights; it needs the package gguf. `make real-model` runs this on SmolLM2-135M-Instruct.
transformers fills in tensors that a file lacks and drops those that it does not know, so the file is compared with its architecture first.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from asyncmoe.errors import AsyncmoeError, DataError, UserError
from asyncmoe.storage import new_directory, writing

_TOP = ("token_embd", "output_norm")
_BLOCK = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm")
_DENSE, _NORMS = ("ffn_gate", "ffn_up", "ffn_down"), ("attn_q_norm", "attn_k_norm")
_EXPERTS = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_BLOCKS = {"llama": (*_BLOCK, *_DENSE), "qwen3": (*_BLOCK, *_NORMS, *_DENSE), "qwen3moe": (*_BLOCK, *_NORMS, *_EXPERTS)}
"""Weights of a block by llama.cpp's name of the architecture: those that both transformers and asyncmoe read."""
_TOKENS = "tokenizer.ggml.tokens"


def convert(file: Path, out: Path) -> None:
    """Write `out`, which must not exist. It is complete or does not exist.

    Raises:
        UserError: the file cannot be used, its model is none that is read exactly, or `out` exists.
        StorageError: `out` cannot be written.
    """
    keys, tensors = _header(file)
    architecture = _checked(file, keys, tensors)
    with new_directory("model", out) as scratch:
        try:
            model, tokenizer = _read(file, architecture, keys)
        except Exception as error:  # transformers has no error of its own for a file that it cannot use
            expected = f"a model of {architecture} that transformers reads"
            raise DataError(str(file), got=f"{type(error).__name__}: {_line(error)}", expected=expected) from error
        if tokenizer.chat_template is None:
            print(f"warning: {file} has no chat template: train with task.chat_template=false, or put one into {out}/chat_template.jinja")
        with writing("model", out):
            model.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
            for path in scratch.glob("*.safetensors"):
                path.chmod((scratch / "config.json").stat().st_mode)  # safetensors writes for its user alone
    print(f"{out}: {model.config.model_type}, {sum(value.numel() for value in model.parameters()) / 1e6:.1f} million parameters")


def _header(file: Path) -> tuple[dict[str, Any], set[str]]:
    """Return the file's keys and the names of its tensors, all of which are in the file to their ends."""
    if not file.is_file():
        raise DataError(str(file), got="no file", expected="a GGUF file")
    try:
        package: Any = import_module("gguf")
    except ImportError as error:
        raise UserError("the package gguf", got="nothing", expected="an installed one", hint="pip install gguf==0.19.0") from error
    with file.open("rb") as opened:
        if (magic := opened.read(4)) != b"GGUF":
            raise DataError(str(file), got=f"a file that begins with {magic!r}", expected="a GGUF file")
    try:
        reader = package.GGUFReader(file)
        keys = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the reader takes numbers from wherever the file ends
        got = f"{type(error).__name__}: {_line(error)}"
        raise DataError(
            str(file), got=got, expected="a whole GGUF file", hint="the file is cut short or damaged: fetch it again"
        ) from error
    return keys, {tensor.name for tensor in reader.tensors}


def _checked(file: Path, keys: dict[str, Any], tensors: set[str]) -> str:
    """Return the architecture, of which the file has every tensor and no other, and nothing else that transformers would leave out."""
    name = str(keys.get("general.architecture"))
    if name not in _BLOCKS:
        raise DataError(str(file), got=f"a model of {name}", expected=" or ".join(_BLOCKS))
    if name == "llama" and (count := keys.get("llama.expert_count", 0)):
        raise DataError(str(file), got=f"a mixture of {count} experts", expected="a dense Llama: transformers reads no other from GGUF")
    scaling = keys.get(f"{name}.rope.scaling.type", "none")
    if "rope_freqs.weight" in tensors or scaling != "none" or f"{name}.rope.scale_linear" in keys:
        got = f"scaled rotary frequencies ({'rope_freqs.weight' if scaling == 'none' else scaling}), which transformers drops"
        raise DataError(
            str(file), got=got, expected="unscaled ones", hint="take the model's safetensors, whose config.json has the scaling"
        )
    if not keys.get(_TOKENS):
        raise DataError(str(file), got="no tokenizer", expected=f"one in {_TOKENS}")
    blocks = int(keys.get(f"{name}.block_count", 0))
    wanted = {f"{part}.weight" for part in _TOP} | {f"blk.{i}.{part}.weight" for i in range(blocks) for part in _BLOCKS[name]}
    if missing := sorted(wanted - tensors):
        raise DataError(f"{file}: tensor {missing[0]}", got="nothing", expected=f"a tensor, as {name} with {blocks} blocks has it")
    if unknown := sorted(tensors - wanted - {"output.weight"}):
        raise DataError(f"{file}: tensor {unknown[0]}", got="a tensor that transformers drops", expected=f"none but those of {name}")
    return name


def _read(file: Path, architecture: str, keys: dict[str, Any]) -> tuple[Any, Any]:
    """Return the model in bfloat16, and its tokenizer."""
    place = {"gguf_file": file.name}
    config = AutoConfig.from_pretrained(file.parent, **place)
    head = keys.get(f"{architecture}.attention.key_length", config.head_dim)
    if (turned := keys.get(f"{architecture}.rope.dimension_count", head)) != head:
        raise ValueError(f"{turned} of {head} dimensions of a head are rotated, not all")
    config.head_dim = head  # transformers leaves out the size of Qwen3's heads, and of Qwen3-MoE's experts
    if (width := keys.get(f"{architecture}.expert_feed_forward_length")) is not None:
        config.moe_intermediate_size = width
    read = AutoModelForCausalLM.from_pretrained(file.parent, config=config, dtype=torch.float32, **place)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **place)
    # A model that was read from GGUF counts as quantised, which transformers refuses to save.
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    return plain, tokenizer


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"error: got {len(sys.argv) - 1} arguments, expected FILE and OUT")
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except AsyncmoeError as failure:
        sys.exit(f"error: {failure}")
