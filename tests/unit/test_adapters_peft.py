"""Reading and writing PEFT's adapters, checked with PEFT itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftConfig

from asyncmoe.errors import DataError, UserError
from asyncmoe.models import family_of, load_hf_config, qwen3_moe
from asyncmoe.models.lora import adapter as adapters
from asyncmoe.models.lora import peft
from asyncmoe.models.lora.adapter import DTYPES, Adapter, Kind
from asyncmoe.models.shape import Shape
from tests import families
from tests.unit.adapters import ALL as TARGETS
from tests.unit.adapters import load, merge, random_adapter, shape
from tests.unit.example_counts import examples
from tests.unit.test_adapters import MODELS

ALL = Kind(TARGETS, 3, 6.0)


def same(left: Adapter, right: Adapter) -> bool:
    named = [{name: value.tobytes() for name, value in adapter.values.items()} for adapter in (left, right)]
    return named[0] == named[1] and (left.kind, left.dtype) == (right.kind, right.dtype)


def expressible(m: Shape, kind: Kind) -> bool:
    of_experts = set(adapters.MLP) & set(kind.targets)
    return not m.experts or of_experts in (set(), set(adapters.MLP), {"down_proj"})


@given(MODELS, st.integers(0, 99), st.sampled_from(sorted(DTYPES)))
@settings(max_examples=examples(40), deadline=None)
def test_what_is_written_is_read_again(tmp_path_factory, model, seed, dtype) -> None:  # type: ignore[no-untyped-def]
    """Shared halves are written for each expert, and recognised as shared when read."""
    m, kind = model
    adapter = random_adapter(m, kind, seed, dtype)
    if not expressible(m, kind):
        with pytest.raises(UserError, match="PEFT supports no other targets on experts"):
            peft.to_peft(m, adapter, "base")
        return
    folder = tmp_path_factory.mktemp("adapter")
    peft.write(folder, peft.to_peft(m, adapter, "base"))
    found = peft.from_peft(m, peft.read(folder))
    assert found.kind.experts == "per_expert"
    assert same(peft.shared(m, found) if kind.experts == "shared_outer" else found, adapter)


def test_experts_that_differ_cannot_share() -> None:
    with pytest.raises(UserError, match=r"layers\.0\.experts\.1\.up_proj\.a: got values of its own, .*; set lora\.experts to per_expert"):
        peft.shared(shape(), random_adapter(shape(), Kind(("q_proj", "up_proj"), 2, 4.0), 0))


FRONT = "base_model.model.model.layers"


@pytest.mark.parametrize(
    ("tensor", "shape_of", "config", "match"),
    [
        ("base_model.model.lm_head", (3, 8), {}, "lm_head.* got a module that cannot have an adapter"),
        (f"{FRONT}.0.mlp.shared_expert.up_proj", (3, 8), {}, "shared_expert.* got a module that cannot have an adapter"),
        (f"{FRONT}.7.self_attn.q_proj", (3, 8), {}, r"layers\.7\.self_attn.* got a module that cannot have an adapter"),
        (f"{FRONT}.1.self_attn.q_proj", (3, 9), {}, r"layers\.1\.q_proj\.a: got \(3, 9\), expected \(3, 8\)"),
        (f"{FRONT}.1.self_attn.q_proj", None, {}, r"layers\.1\.q_proj\.a: got nothing, expected \(3, 8\)"),
        (f"{FRONT}.0.mlp.experts", (3, 8), {}, "target_parameters .*got none"),
        (f"{FRONT}.0.mlp.experts", (3, 8), {"target_parameters": ["mlp.experts.down_proj"]}, r"experts\.lora_A\.weight: got \(3, 8\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tensor: str, shape_of: tuple[int, ...] | None, config: dict[str, Any], match: str) -> None:
    files, name = peft.to_peft(shape(), random_adapter(shape(), ALL, 0), "base"), f"{tensor}.lora_A.weight"
    more = {} if shape_of is None else {name: np.zeros(shape_of, np.float32)}
    tensors = {other: value for other, value in files.tensors.items() if other != name} | more
    with pytest.raises(UserError, match=match):
        peft.from_peft(shape(), peft.Files({**files.config, **config}, files.dtype, tensors))


ODD = {"peft_type": "IA3", "init_lora_weights": "pissa", "rank_pattern": {"q": 8}, "alpha_pattern": {"q": 8}}
MEANT = {"r", "lora_alpha", "target_parameters", *(one.name for one in dataclasses.fields(PeftConfig))} - {"peft_type"}
NOTHING = {"target_modules", "exclude_modules", "layers_pattern", "lora_dropout", "megatron_core", "qalora_group_size", "eva_config"}
PLAIN = {"r": 4, "lora_alpha": 4, "peft_type": "LORA"}


def test_every_key_of_pefts_configuration_is_understood_or_refused() -> None:
    odd = {field.name: ODD.get(field.name, "odd") for field in dataclasses.fields(LoraConfig) if field.name not in MEANT}
    with pytest.raises(UserError) as caught:
        peft.check_features({**PLAIN, **odd})
    assert {line.split()[0] for line in str(caught.value).splitlines()} == odd.keys() - NOTHING - {"ensure_weight_tying"}
    assert "path_initial_model_for_weight_conversion" in str(caught.value)


def test_what_says_nothing_or_keeps_the_base_weights_passes() -> None:
    for init in (True, False, "gaussian", "orthogonal"):
        nothing = {**dict.fromkeys(MEANT - {"r", "lora_alpha"}), "new": None, "loftq_config": {}, "modules_to_save": []}
        peft.check_features({**PLAIN, **nothing, "init_lora_weights": init})
    with pytest.raises(UserError, match=r"unheard_of in adapter_config\.json: got 1"):
        peft.check_features({**PLAIN, "unheard_of": 1})


def test_what_training_starts_from_fits_it(tmp_path: Path) -> None:
    m, shared = shape(), Kind(TARGETS, 3, 6.0, "shared_outer")
    alike = random_adapter(m, shared, 1)
    peft.write(tmp_path, peft.to_peft(m, alike, "Qwen/Qwen3-30B-A3B"))

    def start(kind: Kind, base: str = "/models/Qwen3-30B-A3B", of: Shape = m) -> Adapter:
        return peft.start_from(tmp_path, of, kind, base)

    assert same(start(shared), alike)
    assert start(ALL).kind == ALL
    for kind, match in (
        (Kind(TARGETS, 2, 6.0), r"rank of the adapter in .*: got 3, expected 2; set lora\.rank to 3"),
        (Kind(TARGETS, 3, 4.0), r"alpha of .*: got 6, expected 4\.0; set lora\.alpha to 6"),
        (Kind(("q_proj",), 3, 6.0), r"targets of .*; set lora\.targets to q_proj, k_proj"),
    ):
        with pytest.raises(UserError, match=match):
            start(kind)
    with pytest.raises(UserError, match=r"base model .*: got Qwen/Qwen3-30B-A3B, expected /models/Qwen3-4B"):
        start(ALL, base="/models/Qwen3-4B")
    with pytest.raises(UserError, match=r"got \(3, 8\), expected \(3, 12\); the model has 2 layers, hidden size 12"):
        start(ALL, of=shape(hidden=12))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    m = shape()
    with pytest.raises(DataError, match=r"got no adapter_config\.json"):
        peft.read(tmp_path)
    peft.write(tmp_path, peft.to_peft(m, random_adapter(m, ALL, 0), "base"))
    (tmp_path / peft.MODEL).write_bytes((tmp_path / peft.MODEL).read_bytes()[:-1])
    with pytest.raises(DataError, match=r"adapter_model\.safetensors"):
        peft.read(tmp_path)
    for text in ("{", "[]", json.dumps({"r": "4", "lora_alpha": 8})):
        (tmp_path / peft.CONFIG).write_text(text)
        with pytest.raises(DataError, match=r"adapter_config\.json"):
            peft.read(tmp_path)


def logits(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return np.asarray(model(torch.arange(20, 60)[None]).logits[0])


@pytest.mark.parametrize(
    ("family", "targets"),
    [("qwen3_moe", ("q_proj", "down_proj")), *((name, ()) for name in ("qwen3_moe", "mixtral", "glm", "deepseek", "moonlight"))],
)
def test_peft_computes_what_the_merged_weights_do(tmp_path: Path, family: str, targets: tuple[str, ...]) -> None:
    from peft import PeftModel

    path = families.write(tmp_path / "model", family)
    hf = load_hf_config(path)
    m = family_of(hf).shape_of(hf)
    adapter = random_adapter(m, Kind(targets or m.adapters, 3, 6.0), 0)
    peft.write(tmp_path, peft.to_peft(m, adapter, str(path)))
    theirs = PeftModel.from_pretrained(load(path), tmp_path)
    merged = logits(merge(load(path), m, adapter))
    assert np.abs(logits(theirs) - merged).max() < 1e-4
    assert np.abs(logits(load(path)) - merged).max() > 0.1


@pytest.mark.parametrize("parameters", [("gate_up_proj", "down_proj"), ("down_proj",), ("gate_up_proj",)])
def test_adapters_of_parameters_mean_here_what_they_mean_to_peft(tmp_path: Path, parameters: tuple[str, ...]) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    path = families.write(tmp_path / "model", "qwen3_moe")
    m = qwen3_moe.FAMILY.shape_of(load_hf_config(path))
    named = [f"mlp.experts.{name}" for name in parameters]
    theirs = get_peft_model(load(path), LoraConfig(r=3, lora_alpha=6, target_modules=["o_proj"], target_parameters=named)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    theirs.save_pretrained(tmp_path)
    adapter = peft.from_peft(m, peft.read(tmp_path))
    found = {target for target in adapters.MLP if target in adapter.kind.targets}
    assert found == {target for target in adapters.MLP if ("down_proj" if target == "down_proj" else "gate_up_proj") in parameters}
    assert np.abs(logits(theirs) - logits(merge(load(path), m, adapter))).max() < 1e-4
