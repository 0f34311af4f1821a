"""Keys of config.json mean what they mean to transformers, whose classes the engines read it with, and unknown ones do not pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from asyncmoe.errors import UserError
from asyncmoe.models import FAMILIES, EngineParallel, MegatronParallel
from asyncmoe.models.config_keys import unknown
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


@pytest.mark.parametrize("name", REAL)
def test_published_models_have_no_unknown_keys(name: str) -> None:
    assert unknown(REAL[name], FAMILIES[REAL[name]["model_type"]].keys) == []
