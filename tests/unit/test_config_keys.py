"""Keys of config.json mean the same as in transformers, whose classes the engines use, and unknown keys are refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from asyncmoe.errors import UserError
from asyncmoe.models import FAMILIES, EngineParallel, MegatronParallel
from asyncmoe.models.config_keys import misfits, unknown
from benchmarks.published import REAL
from tests import families

KINDS = sorted({family.name for family in FAMILIES.values()})


@pytest.mark.parametrize("kind", KINDS)
def test_absent_keys_have_the_values_of_transformers_class(kind: str) -> None:
    base = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    fields = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[kind]) if field.name not in base}
    keys = FAMILIES[kind].keys
    assert {key: fields[key] for key in keys if key in fields} == {key: value for key, value in keys.items() if key in fields}
    assert unknown(dict.fromkeys(fields, 7), keys) == [], "a field of the class that nobody has looked at"
    assert "odd = 7" in str(unknown({"odd": 7, "_note": 7, "none": None}, keys)[0])
    for name, same in CONFIG_MAPPING[kind].attribute_map.items():
        assert {name, same} <= set(str(misfits({name: 0, same: 1})[-1]).split()), "two names of one value differ"


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind in KINDS for key in FAMILIES[kind].keys])
def test_a_key_that_is_absent_changes_nothing_if_it_has_the_default(kind: str, key: str) -> None:
    family, name = FAMILIES[kind], next(name for name, one in families.MODELS.items() if one["model_type"] == kind)
    hf = families.sized(families.ENGINE, name)

    def outcome(values: dict[str, Any]) -> Any:
        try:
            family.check(values, MegatronParallel(), EngineParallel())
        except UserError as error:
            return str(error)
        return family.shape_of(family.completed(values)), family.megatron_config(values)

    assert outcome({other: value for other, value in hf.items() if other != key}) == outcome({**hf, key: family.keys[key]})


_TURNED = {"rope_type": "default", "rope_theta": 1e4}
ODD: dict[str, list[Any]] = {
    "rms_norm_eps": [float("nan"), float("inf"), -1, 0, None, "1e-6", True],
    "rope_theta": [0, -5, "10000", None, 5e3],  # the last differs from rope_parameters.rope_theta
    "rope_parameters": [{**_TURNED, "rope_theta": "1e4"}, {**_TURNED, "partial_rotary_factor": -1}, {**_TURNED, "factor": "8"}, "default"],
    "max_position_embeddings": ["2048", 0, 1.5, None],
    "num_hidden_layers": [True, 3.0, -3, 1 << 70],
    "vocab_size": [True, "320"],
    "tie_word_embeddings": ["false", 0],
    "attention_dropout": ["0", float("nan")],
    "dtype": ["banana", 16, "float64"],
    "layer_types": [["full_attention"], "full_attention"],
    "architectures": [["Qwen2ForCausalLM"], ["Qwen3ForCausalLM", "LlamaForCausalLM"], "LlamaForCausalLM", {"a": 1}],
    "eos_token_id": [5000, [2, 5000], -1, "</s>", True, 2.0],
}  # fmt: skip
MOE: dict[str, list[Any]] = {"norm_topk_prob": ["true", 1], "num_experts_per_tok": ["2", True], "num_experts": [8.0]}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in {**ODD, **MOE}.items() for value in values])
def test_a_value_of_another_kind_is_refused_by_name(key: str, value: Any) -> None:
    for name in ("qwen3_moe",) if key in MOE else families.MODELS:
        hf = {**families.sized(families.ENGINE, name), "rope_parameters": _TURNED, key: value}
        found = FAMILIES[hf["model_type"]].faults(json.loads(json.dumps(hf)))
        assert any(key in str(error) for error in found), (name, found)


@pytest.mark.parametrize("name", families.MODELS)
def test_what_transformers_class_writes_is_accepted(name: str) -> None:
    hf = families.sized(families.ENGINE, name)
    written = json.loads(CONFIG_MAPPING[hf["model_type"]](**hf).to_json_string(use_diff=False))
    FAMILIES[hf["model_type"]].check(written, MegatronParallel(), EngineParallel())


@pytest.mark.parametrize("name", REAL)
def test_published_models_have_no_unknown_keys(name: str) -> None:
    assert unknown(REAL[name], FAMILIES[REAL[name]["model_type"]].keys) == []
