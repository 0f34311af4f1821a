"""What a checkpoint says of its model, compared with a Hugging Face configuration.

Megatron-LM stores its arguments in `common.pt`; Megatron-Bridge writes `run_config.yaml`, with the fields of TransformerConfig. Shapes tell
most models apart, but not such settings as the base of rotary positions, and a model with another one would compute something else.

Source: `core_transformer_config_from_args` and `validate_args` of Megatron-LM (training/arguments.py), `TransformerConfig` of megatron/core
0.16.1, training/checkpointing.py of Megatron-Bridge.
"""

from __future__ import annotations

import re
import types
from argparse import Namespace
from collections.abc import Callable, Mapping
from math import isclose
from pathlib import Path
from typing import Any

import yaml

from asyncmoe.errors import DataError, UserError, together
from asyncmoe.models.families import family_of
from asyncmoe.models.importing import unpickling
from asyncmoe.models.shape import HfConfig
from asyncmoe.platform.megatron.reader import COMMON, Unreadable

BRIDGE = "run_config.yaml"
_MAX_BYTES = 16 << 20
_ALIASES: Mapping[str, str] = {
    "num_experts": "num_moe_experts",
    "norm_epsilon": "layernorm_epsilon",
    "swiglu": "gated_linear_unit",
    "use_rope_scaling": "rope_scaling",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
}
"""Arguments of Megatron-LM that TransformerConfig or GPTModel calls otherwise."""
_UNTIED = "untie_embeddings_and_output_weights"
_GROUPED = "group_query_attention"
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
    "layernorm_zero_centered_gamma": False,
    "rotary_interleaved": False,
    "window_size": None,
    "qk_l2_norm": False,
    "num_moe_experts": None,
    "multi_latent_attention": False,
    "rope_scaling": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "rotary_percent": 1.0,
    "activation_func": "silu",
    "softmax_type": "vanilla",
    "moe_router_load_balancing_type": None,
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 8192},
}
"""What a family that says nothing of them has."""
_OTHER = re.compile(
    r"interpolation|no_rope|mrope|softmax_scale|skip_freq|clamp_value|glu_(linear|interleave)|output_gate|on_post|attention_variant$|"
    r"linear_attention_(freq|type)|expert_gate|moe_latent|on_input|limited_devices|router_force|capacity_factor|use_mup|mhc_connections|"
    r"^hybrid_(override|layer|att|mlp)|is_hybrid|heterogeneous|quant_recipe|^spec$|_relu|geglu|_gelu|retro_add"
)
"""Names of what no family has, by pattern; None, false and 0 say nothing."""
_SYSTEM = re.compile(
    r"^_|^[ft]p_?\d*_|^(fp|bf)\d+|^(cp|dsa|gdp|gtp|hf|linear|mamba|mhc|mtp|mup)_|^moe_(enable|extended|grouped|use|layer_rec|pad|paged|"
    r"single|token_drop)|^num_layers_|^qk_clip|^use_(arb|cpu|fused|kitchen|mamba|ring|te|transf)|(^|_)(allreduce|autocast|backend|barrier|"
    r"batch|bf16|bias_update|chunks?|clone|comm|cuda|deallocate|deepep|defer|deterministic|dispatch(er)?|dropout|dtype|fp32|fused|fusion|"
    r"gemm|generation|hybridep|inference|init_m\w*|input_jitter|kitchen|latents|logger|logging|loss|microbatch\w*|ncclep|offload\w*|"
    r"overlap|parallel|perform|permute|persist|pipeline|padding|quantile|recompute|remat|replay|seqlen\w*|sequence|split|sync_func|"
    r"grads?(_\w+)?_func|symmetric|timers|token_loss|wgrad|yarn)(_|$)|flash_|account_for|activations$|all_reduce|disable_|distribute_saved|"
    r"hetereogenous_dist|input_store|invariant|layer_scaling$|make_vocab|max_attention_logit|memory_efficient|min_offloaded|"
    r"num_weight_shards|^scatter|^seq_length|should_pad|test_mode|transformer_(impl|layer_spec)|variable_seq|^vocab_size|_modules$|"
    r"^scale_factor$|^max_position|^untie_|^group_query"
)
"""Fields of TransformerConfig and of what Bridge makes of it that change nothing of what the trained weights compute: how, on which system
and in which precision they were trained, and details of features that are refused."""


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
        UserError(f"{name} of the checkpoint", got=got, expected=f"{wanted}, as config.json in {model} says")
        for name, got, wanted in differences(found, expected(hf))
    ]
    for name in unknown(found, every=(folder / BRIDGE).is_file()):
        differ.append(UserError(f"{name} of the checkpoint", got=found[name], expected="only settings that asyncmoe's families have"))
    if differ:
        raise together(differ)
    return []


def unknown(found: Mapping[str, Any], *, every: bool) -> list[str]:
    """Return the settings of a model that are not understood.

    Args:
        every: all settings are of the model, as Bridge's are; most arguments of Megatron-LM are not.
    """
    others = sorted(name for name in found.keys() - {*_COMPARED, *_NEVER} if found[name] and found[name] != ["local"])
    return [name for name in others if _OTHER.search(name) or (every and not _SYSTEM.search(name))]


def read(folder: Path) -> dict[str, Any] | None:
    """Return what a checkpoint says of its model, under the names of TransformerConfig and GPTModel; None if it says nothing.

    Raises:
        DataError: a file cannot be read, or a pickle names what it must not.
    """
    if (folder / BRIDGE).is_file():
        return _of_bridge(folder / BRIDGE)
    try:
        common = unpickling.common(folder / COMMON)
    except Unreadable as error:
        raise DataError(str(folder), got=str(error), expected=f"the {COMMON} that Megatron writes") from error
    arguments = common.get("args")
    if not isinstance(arguments, Namespace | types.SimpleNamespace):
        return None
    return normal(vars(arguments))


def _of_bridge(file: Path) -> dict[str, Any]:
    try:
        if (size := file.stat().st_size) > _MAX_BYTES:
            raise DataError(str(file), got=f"{size} bytes", expected=f"at most {_MAX_BYTES}")
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
        model = dict(values["model"])
    except (yaml.YAMLError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        raise DataError(str(file), got=why, expected="the configuration that Megatron-Bridge writes") from error
    return normal(model)


def normal(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under one name each, with Megatron's defaults where None stands for them."""
    found = {_ALIASES.get(name, name): value for name, value in arguments.items()}
    if found.get("scale_factor"):  # of Bridge's Llama 3.1
        found |= {"rope_scaling": True, "rope_scaling_factor": found["scale_factor"]}
    if _UNTIED in found:
        found["share_embeddings_and_output_weights"] = not found[_UNTIED]
    if found.get(_GROUPED) is False or found.get("num_query_groups", 0) is None:
        found["num_query_groups"] = found.get("num_attention_heads")
    if found.get("moe_ffn_hidden_size", 0) is None and found.get("num_moe_experts"):
        found["moe_ffn_hidden_size"] = found.get("ffn_hidden_size")
    if found.get("rope_type", "") is None:
        found["rope_type"] = "yarn" if found.get("multi_latent_attention") else "rope"
    return found


def expected(hf: HfConfig) -> dict[str, Any]:
    """Return the settings that a model's configuration determines."""
    family = family_of(hf)
    transformer, gpt = family.megatron_config(hf)
    known = {**_NEVER, **transformer, **gpt}
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


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (name, found, wanted) of all settings that differ; those that the checkpoint lacks are not compared."""
    layers = int(wanted["num_layers"])
    plain = _unscaled(found)
    return [
        (name, found[name], value)
        for name, value in wanted.items()
        if name in found
        and not (name == "mscale_all_dim" and plain and not value)
        and not _same(_value(name, found[name], layers), _value(name, value, layers))
    ]


def _unscaled(found: Mapping[str, Any]) -> bool:
    """Return whether positions are not scaled, so that nothing depends on `mscale_all_dim` (`_yarn_get_mscale` of
    transformer/multi_latent_attention.py)."""
    return found.get("rope_type") == "rope" and found.get("rotary_scaling_factor") in (None, 1, 1.0)


def _frequency(value: Any, layers: int) -> Any:
    """Return which layers have experts: a number n stands for every n-th (`get_gpt_decoder_block_spec`)."""
    return [int(layer % value == 0) for layer in range(layers)] if isinstance(value, int) and value > 0 else value


_BALANCED = re.compile(r"(\W*(none|None|(seq_|global_)?aux_loss)\W*)+")
"""Kinds of balancing that only add to the loss; another one routes otherwise."""
_MEANING: Mapping[str, Callable[[Any], Any]] = {
    "moe_router_topk_scaling_factor": lambda value: 1.0 if value is None else value,
    "moe_router_num_groups": lambda value: None if value == 1 else value,
    "rotary_percent": float,
    "activation_func": lambda value: "silu" if re.search(r"\bsilu\b", str(value)) else value,
    "moe_router_load_balancing_type": lambda value: None if _BALANCED.fullmatch(str(value)) else value,
}


def _value(name: str, value: Any, layers: int) -> Any:
    if name == "moe_layer_freq":
        return _frequency(value, layers)
    return _MEANING.get(name, lambda one: one)(value)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return isclose(one, other, rel_tol=1e-9)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) == list(other)
    return bool(one == other) or (not one and not other)
