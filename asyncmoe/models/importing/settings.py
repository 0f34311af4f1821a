"""What a checkpoint says of its model, compared with a Hugging Face configuration.

Megatron-LM stores its arguments in `common.pt`; Megatron-Bridge writes `run_config.yaml`, with the fields of TransformerConfig. Shapes tell
most models apart, but not such settings as the base of rotary positions, and a model with another one would compute something else.

Source: `core_transformer_config_from_args` and `validate_args` of Megatron-LM (training/arguments.py), `TransformerConfig` of megatron/core
0.16.1, training/checkpointing.py of Megatron-Bridge.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from argparse import Namespace
from collections.abc import Mapping
from math import isclose
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from asyncmoe.errors import DataError, UserError, together
from asyncmoe.models.families import family_of
from asyncmoe.models.shape import HfConfig
from asyncmoe.platform.megatron.reader import COMMON

BRIDGE = "run_config.yaml"
_MAX_BYTES = 256 << 20
"""Of a file of settings; they take kilobytes, but `common.pt` has some users' own state too."""
_ALIASES: Mapping[str, str] = {
    "num_experts": "num_moe_experts",
    "norm_epsilon": "layernorm_epsilon",
    "swiglu": "gated_linear_unit",
    "use_rope_scaling": "rope_scaling",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
}
"""Arguments of Megatron-LM that TransformerConfig or GPTModel calls otherwise."""
_COMPARED = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size", "gated_linear_unit"),
    *("add_bias_linear", "add_qkv_bias", "qk_layernorm", "normalization", "layernorm_epsilon", "share_embeddings_and_output_weights"),
    *("position_embedding_type", "rotary_base", "rotary_percent", "rope_scaling", "rope_scaling_factor"),
    *("num_moe_experts", "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax"),
    *("moe_router_topk_scaling_factor", "moe_router_enable_expert_bias", "moe_router_num_groups", "moe_router_group_topk"),
    "moe_shared_expert_intermediate_size",
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type"),
    *("rotary_scaling_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "original_max_position_embeddings"),
)
"""Settings that a family determines and that change what a model computes."""
_NEVER: Mapping[str, object] = {
    **dict.fromkeys(("layernorm_zero_centered_gamma", "rotary_interleaved", "qk_l2_norm", "multi_latent_attention", "rope_scaling"), False),
    **dict.fromkeys(("squared_relu", "use_mup", "attention_output_gate"), False),
    **dict.fromkeys(("window_size", "num_moe_experts", "moe_router_num_groups", "moe_router_load_balancing_type"), None),
    **dict.fromkeys(("rotary_seq_len_interpolation_factor", "seq_len_interpolation_factor", "no_rope_freq"), None),
    **{"moe_router_topk_scaling_factor": 1.0, "rotary_percent": 1.0, "activation_func": "silu", "softmax_type": "vanilla"},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 8192},
}
"""What a family that says nothing of them has, and every family of the last of them."""
_BALANCED = re.compile(r"(\W*(none|None|(seq_|global_)?aux_loss)\W*)+")
"""Kinds of balancing that only add to the loss; another one routes otherwise."""


def check(folder: Path, hf: HfConfig, model: Path) -> list[str]:
    """Compare a checkpoint's settings with a configuration. Return notes for the user.

    Args:
        folder: of the iteration.
        model: the directory that `hf` is from.

    Raises:
        UserError: settings differ; a line for each.
        DataError: a file of settings cannot be read.
    """
    found = read(folder)
    if found is None:
        return ["the checkpoint has no arguments of Megatron's: only names and shapes of its weights were compared with --model"]
    differ = [
        UserError(f"{name} of the checkpoint", got=found[name], expected=f"{wanted}, as config.json in {model} says")
        for name, wanted in expected(hf).items()
        if name in found and not _same(found[name], wanted)
    ]
    if differ:
        raise together(differ)
    return []


def read(folder: Path) -> dict[str, Any] | None:
    """Return what a checkpoint says of its model, under the names of TransformerConfig and GPTModel; None if it says nothing.

    Raises:
        DataError: a file cannot be read.
    """
    file = next((file for file in (folder / BRIDGE, folder / COMMON) if file.is_file()), folder / COMMON)
    try:
        if (size := file.stat().st_size) > _MAX_BYTES:
            raise ValueError(f"{size} bytes")
        if file.name == BRIDGE:
            return normal(yaml.safe_load(file.read_text(encoding="utf-8"))["model"])
        arguments = _common(file).get("args")
    except Exception as error:  # bytes from a stranger may make a parser raise anything
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        raise DataError(str(file), got=why, expected="what Megatron-LM or Megatron-Bridge writes") from error
    return normal(vars(arguments)) if isinstance(arguments, Namespace | SimpleNamespace) else None


class _Inert:
    """Stands for whatever else a pickle names: nothing of it is imported or called."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...

    def __setitem__(self, *_: object) -> None: ...

    def append(self, _: object) -> None: ...


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        plain: dict[tuple[str, str], type] = {("argparse", "Namespace"): Namespace, ("types", "SimpleNamespace"): SimpleNamespace}
        return plain.get((module, name)) or type(name, (_Inert,), {"__module__": module})

    def persistent_load(self, pid: Any) -> _Inert:
        """Stand for a tensor's memory."""
        return _Inert()


def _common(file: Path) -> dict[str, Any]:
    """Return a pickled mapping that `torch.save` wrote (torch/serialization.py), with plain values only."""
    with zipfile.ZipFile(file) as parts:
        (part,) = [one for one in parts.infolist() if one.filename.endswith("/data.pkl") and one.file_size <= _MAX_BYTES]
        found: dict[str, Any] = _Unpickler(io.BytesIO(parts.read(part))).load()
    return found


def normal(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under one name and in one form each, with Megatron's defaults where None stands for them."""
    found = {_ALIASES.get(name, name): value for name, value in settings.items()}
    if found.get("scale_factor"):  # of Bridge's Llama 3.1
        found |= {"rope_scaling": True, "rope_scaling_factor": found["scale_factor"]}
    if (untied := found.get("untie_embeddings_and_output_weights")) is not None:
        found["share_embeddings_and_output_weights"] = not untied
    if found.get("group_query_attention") is False or found.get("num_query_groups", 0) is None:
        found["num_query_groups"] = found.get("num_attention_heads")
    if found.get("moe_ffn_hidden_size", 0) is None and found.get("num_moe_experts"):
        found["moe_ffn_hidden_size"] = found.get("ffn_hidden_size")
    if found.get("rope_type", "") is None:
        found["rope_type"] = "yarn" if found.get("multi_latent_attention") else "rope"
    if isinstance(every := found.get("moe_layer_freq"), int) and every > 0:  # every n-th layer has experts (`get_gpt_decoder_block_spec`)
        found["moe_layer_freq"] = [int(layer % every == 0) for layer in range(found["num_layers"])]
    if found.get("moe_router_topk_scaling_factor", 0) is None:
        found["moe_router_topk_scaling_factor"] = 1.0
    if found.get("moe_router_num_groups") == 1:
        found["moe_router_num_groups"] = None
    if re.search(r"\bsilu\b", str(found.get("activation_func"))):
        found["activation_func"] = "silu"
    if _BALANCED.fullmatch(str(found.get("moe_router_load_balancing_type"))):
        found["moe_router_load_balancing_type"] = None
    if found.get("rope_type") == "rope" and found.get("rotary_scaling_factor") in (None, 1, 1.0):
        found["mscale_all_dim"] = 0.0  # nothing depends on it (`_yarn_get_mscale` of transformer/multi_latent_attention.py)
    return found


def expected(hf: HfConfig) -> dict[str, Any]:
    """Return the settings that a model's configuration determines."""
    family = family_of(hf)
    transformer, gpt = family.megatron_config(hf)
    known = normal({**_NEVER, **transformer, **gpt})
    left_out = set()
    if known["multi_latent_attention"]:
        left_out |= {"num_query_groups", "kv_channels"}
        if known["rope_type"] == "rope":
            left_out |= {"rotary_scaling_factor"}
    if not family.shape_of(hf).dense_layers:
        left_out |= {"ffn_hidden_size"}
    if known.get("moe_router_score_function") == "sigmoid":
        left_out |= {"moe_router_pre_softmax"}
    return {name: known[name] for name in (*_COMPARED, *_NEVER) if name in known and name not in left_out}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return isclose(one, other, rel_tol=1e-9)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) == list(other)
    return bool(one == other) or (not one and not other)
