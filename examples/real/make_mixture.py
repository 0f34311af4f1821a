"""Write a dense Llama such as SmolLM2 as a mixture of experts (Mixtral): python examples/real/make_mixture.py DENSE OUT

Each layer gets a router and copies of its MLP (sparse upcycling, arXiv 2212.05055). The weights of the chosen experts sum to 1, so with
--fresh 0 the mixture computes what the dense model does, whatever its routers say. Equal experts would learn equally, though, and their
routers nothing, so a share of each expert's neurons starts anew (Drop-Upcycling, arXiv 2502.19261, section 3.2).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from asyncmoe.errors import AsyncmoeError, DataError
from asyncmoe.models import EngineParallel, MegatronParallel, family_of, load_hf_config
from asyncmoe.models.shape import HfConfig, rope
from asyncmoe.storage import new_directory, writing

_KEPT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "hidden_act", "rms_norm_eps", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "dtype",
)  # fmt: skip
_PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Matrices of Llama's MLP by Mixtral's names. A neuron is a row of gate and of up, and a column of down."""


def make(dense: Path, out: Path, experts: int = 4, top_k: int = 2, fresh: float = 0.02, seed: int = 0) -> None:
    """Write the mixture, with the dense model's tokenizer. `out` must not exist; it is complete or does not exist.

    Args:
        experts: experts of each layer, of which a router chooses `top_k` for a token.
        fresh: share of each expert's neurons that start anew; others in each expert.
        seed: of routers and new neurons.

    Raises:
        DataError: `dense` is no Llama whose attention and MLP have no biases, or `out` exists.
        ConfigError: Mixtral lacks something that the dense model has, such as scaled rotary frequencies.
        StorageError: `out` cannot be written.
    """
    hf = load_hf_config(dense)
    if hf["model_type"] != "llama":
        raise DataError(str(dense), got=f"a model of {hf['model_type']}", expected="a dense Llama")
    values = settings(hf, experts, top_k)
    family = family_of(values)
    family.check(values, MegatronParallel(), EngineParallel())
    stored = {name: value for file in sorted(dense.glob("*.safetensors")) for name, value in load_file(file).items()}
    try:
        tensors = mixture(stored, experts, fresh, torch.Generator().manual_seed(seed))
    except KeyError as missing:
        raise DataError(f"{dense}: tensor {missing.args[0]}", got="nothing", expected="one in its safetensors files") from missing
    if different := tensors.keys() ^ family.hf_layout(values, "float32").storages.keys():
        raise DataError(f"{dense}: tensors", got=f"{min(different)} missing or unknown", expected="those of a Llama without biases")
    with new_directory("mixture", out) as scratch, writing("mixture", out):
        save_file(tensors, weights := scratch / "model.safetensors", {"format": "pt"})
        (scratch / "config.json").write_text(json.dumps(values, indent=2) + "\n")
        weights.chmod((scratch / "config.json").stat().st_mode)  # safetensors writes for its user alone
        for text in (*dense.glob("*token*"), *dense.glob("*.jinja"), *dense.glob("vocab*"), *dense.glob("merges*")):
            shutil.copyfile(text, scratch / text.name)


def settings(hf: HfConfig, experts: int, top_k: int) -> HfConfig:
    """Return config.json of the mixture."""
    return {
        **{key: hf[key] for key in _KEPT if hf.get(key) is not None},
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "rope_parameters": rope(hf),
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "tie_word_embeddings": False,  # SGLang's mixtures have no tied output layer
    }


def mixture(dense: Mapping[str, torch.Tensor], experts: int, fresh: float, draws: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the mixture's tensors by Hugging Face's names."""
    found = {name: value for name, value in dense.items() if ".mlp." not in name}
    found.setdefault("lm_head.weight", dense["model.embed_tokens.weight"].clone())  # tied
    layers = sum(name.endswith(".mlp.gate_proj.weight") for name in dense)
    for layer in (f"model.layers.{number}" for number in range(layers)):
        matrices = {part: dense[f"{layer}.mlp.{part}.weight"] for part in _PARTS}
        width, hidden = matrices["gate_proj"].shape
        place = f"{layer}.block_sparse_moe"
        found[f"{place}.gate.weight"] = (0.02 * torch.randn(experts, hidden, generator=draws)).to(matrices["gate_proj"].dtype)
        for expert in range(experts):
            neurons = torch.randperm(width, generator=draws)[: round(fresh * width)]
            for part, name in _PARTS.items():
                along = 1 if part == "down_proj" else 0
                found[f"{place}.experts.{expert}.{name}.weight"] = renewed(matrices[part], neurons, along, draws)
    return found


def renewed(matrix: torch.Tensor, neurons: torch.Tensor, along: int, draws: torch.Generator) -> torch.Tensor:
    """Return a copy whose rows (`along` 0) or columns (1) at `neurons` are drawn with the mean and the deviation of the matrix."""
    wide = matrix.float()
    size = (len(neurons), matrix.shape[1]) if along == 0 else (matrix.shape[0], len(neurons))
    drawn = wide.mean() + wide.std() * torch.randn(size, generator=draws)
    return matrix.clone().index_copy_(along, neurons, drawn.to(matrix.dtype))


def main() -> None:
    """Read the arguments and write the mixture."""
    parser = argparse.ArgumentParser(description="Write a dense Llama as a mixture of experts.")
    parser.add_argument("dense", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--fresh", type=float, default=0.02, help="share of each expert's neurons that start anew")
    parser.add_argument("--seed", type=int, default=0)
    make(**vars(parser.parse_args()))


if __name__ == "__main__":
    try:
        main()
    except AsyncmoeError as failure:
        sys.exit(f"error: {failure}")
