"""The keys of config.json: defaults of absent keys, the keys that are understood, and refusal of all others.

An absent key has the default of transformers' class for the `model_type`, because engines read config.json with that class. A key that is
neither understood nor known to be harmless is refused, as it could describe a different model from the one trained and served.

Source: configuration_*.py of transformers 5.19 for each `model_type`; `RotaryEmbeddingConfigMixin` of modeling_rope_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, TypeAdapter, ValidationError

from asyncmoe.errors import ConfigError, UserError

FAMILY = "asyncmoe_family"
"""Key under which a model's configuration in memory names the user's own family. In a file it is refused, because a checkpoint must not
choose the code that runs."""
ALL: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0,
}  # fmt: skip
"""Keys of every family; see `Family.keys`."""
_READ = re.compile(
    rf"{FAMILY}|model_type|(torch_)?dtype|quantization_config(\..*)?|rope_theta|partial_rotary_factor|layer_types|(vocab|hidden|"
    r"(moe_)?intermediate)_size|num_(hidden_layers|(attention|key_value)_heads|(local_)?experts(_per_tok)?|nextn_predict_layers|"
    r"mtp_layers)|n_routed_experts|kv_lora_rank|(qk_|v_)?(rope_|nope_)?head_dim|rope_(parameters|scaling)(\.((rope_)?type|rope_theta|"
    r"factor|original_max\w+|(low|high)_freq_factor|beta_(fast|slow)|mscale(_all_dim)?|attention_factor|truncate|partial_rotary_factor))?"
)
"""Keys that are read, refused or checked for every model: sizes, which are required, and settings with several spellings."""
_NOTHING = re.compile(
    r"_.*|.*_token_ids?|architectures|auto_map|transformers(_version|\.js_config)|name_or_path|use_cache|initializer_range|pretraining_tp|"
    r"(output_)?router_(logits|aux_loss_coef)|aux_loss_alpha|seq_aux|ep_size|max_window_layers|id2label|label2id|num_labels|problem_type|"
    r"output_(hidden_states|attentions)|(use_)?return_dict(_in_generate)?|chunk_size_feed_forward|tie_last_hidden_states|tokenizer_class|"
    r"task_specific_params|(attn|experts)_implementation|is_llama_config|unsloth_(fixed|version)|(max|min)_(length|new_tokens)|do_sample|"
    r"temperature|top_[kp]|repetition_penalty|num_(beams|return_sequences)|is_(de|en)coder\w*|add_cross_attention|tie_encoder_decoder|"
    r"torchscript|rope_interleaved|model_max_length|max_sequence_length|gradient_checkpointing"
)
"""Keys that do not affect a model's computation: notes, training settings, and generation settings, which every request states itself."""

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_SIZE, _COUNT = Field(gt=0, lt=1 << 31), Field(lt=1 << 16)
"""Bounds of sizes, and of counts of layers and experts: loops over an absurd count would never finish."""
_KINDS: Mapping[str, Any] = {
    "max_position_embeddings|decoder_sparse_step": Annotated[int, _SIZE],
    "num_hidden_layers|num_(local_)?experts|n_routed_experts": Annotated[int, _SIZE, _COUNT] | None,
    r"(vocab|hidden|(moe_)?intermediate)_size|num_((attention|key_value)_heads|experts_per_tok)|(q|kv)_lora_rank|n_group|topk_group|"
    r"(qk_|v_)?(rope_|nope_)?head_dim|moe_layer_freq|sliding_window|.*\.original_max\w+": Annotated[int, _SIZE] | None,
    "n_shared_experts|first_k_dense_replace|num_(nextn_predict|mtp)_layers": Annotated[int, Field(ge=0), _COUNT] | None,
    r"rms_norm_eps|routed_scaling_factor|(.*\.)?rope_theta": PositiveFloat,
    r"(.*\.)?partial_rotary_factor|.*\.((low_freq_|high_freq_|attention_)?factor|beta_\w+)": PositiveFloat | None,
    r".*\.mscale\w*": NonNegativeFloat | None,
    r"\w+_bias|use_(sliding_window|qk_norm)|tie_word_embeddings|norm_topk_prob|rope_interleave|.*\.truncate": bool | None,
    "(torch_)?dtype": Literal["bfloat16", "float16", "float32"] | None,
    "rope_parameters|rope_scaling|quantization_config": dict[str, Any] | None,
    r"layer_types|quantization_config\.(ignored_layers|modules_to_not_convert)": list[str] | None,
    "mlp_only_layers": list[int] | None,
    r"\w+_token_id": int | list[int] | None,
}  # fmt: skip
"""Types of the values that asyncmoe, Megatron or engines read."""
_TWINS = (("num_experts", "num_local_experts", "n_routed_experts"), ("num_nextn_predict_layers", "num_mtp_layers"))
"""Aliases of one value: `attribute_map` of transformers' classes."""


def misfits(hf: Mapping[str, Any], file: str = "config.json") -> list[UserError]:
    """Return an error for each value of the wrong type, and for aliases with different values.

    Args:
        file: name of the file, for messages.
    """
    found: list[UserError] = []
    token: Any = Annotated[int, Field(ge=0, lt=hf["vocab_size"] if isinstance(hf.get("vocab_size"), int) else None)]
    kinds = {"eos_token_id": token | list[token] | None, **_KINDS}
    for key, value in _flat(hf).items():
        kind = next((kind for pattern, kind in kinds.items() if re.fullmatch(pattern, key)), Any)
        try:
            TypeAdapter(kind, config=_STRICT).validate_python(value)
        except ValidationError as error:
            expected = " or ".join(one["msg"].removeprefix("Input should be ") for one in error.errors())
            found.append(ConfigError(f"{key} in {file}", got=repr(value)[:120], expected=expected))
    for given in ({name: hf[name] for name in names if hf.get(name) is not None} for names in _TWINS):
        if len({*map(repr, given.values())}) > 1:
            found.append(ConfigError(f"{' and '.join(given)} in config.json", got=[*given.values()], expected="the same value for both"))
    return found


def _flat(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the keys of its rotary parameters and quantisation added."""
    inner = {key: value for key, value in hf.items() if re.match("rope_|quant", key) and isinstance(value, Mapping)}
    return {**hf, **{f"{key}.{name}": value for key, values in inner.items() for name, value in values.items()}}


def unknown(hf: Mapping[str, Any], keys: Mapping[str, Any]) -> list[UserError]:
    """Return an error that names the keys that are not understood; no error if the family's `keys` are empty."""
    given = _flat(hf)
    odd = [key for key in given.keys() - keys.keys() if given[key] is not None and not (_READ.fullmatch(key) or _NOTHING.fullmatch(key))]
    if not odd or not keys:
        return []
    told = ", ".join(f"{key} = {given[key]!r}"[:120] for key in sorted(odd))
    hint = "remove them if they do not change the computation; otherwise the model needs a family of its own (model.family)"
    return [ConfigError("keys of config.json", got=told, expected="only keys that asyncmoe knows for its model_type", hint=hint)]
