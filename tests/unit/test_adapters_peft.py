"""PEFT's adapters are read and written; what PEFT makes of them is asked of PEFT."""

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

from asyncmoe.config.model import MadeModel
from asyncmoe.errors import DataError, UserError
from asyncmoe.models import family_of, load_hf_config, qwen3_moe
from asyncmoe.models.lora import adapter as adapters
from asyncmoe.models.lora import peft
from asyncmoe.models.lora.adapter import DTYPES, Adapter, Kind
from asyncmoe.models.make import make_model
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
    of_experts = {"gate_proj", "up_proj", "down_proj"} & set(kind.targets)
    return not m.experts or not of_experts or (kind.experts == "per_expert" and (len(of_experts) == 3 or of_experts == {"down_proj"}))


@given(MODELS, st.integers(0, 99), st.sampled_from(sorted(DTYPES)))
@settings(max_examples=examples(40), deadline=None)
def test_what_is_written_is_read_again(tmp_path_factory, model, seed, dtype) -> None:  # type: ignore[no-untyped-def]
    m, kind = model
    kind = Kind(kind.targets, kind.rank, kind.alpha) if not set(kind.targets) & set(adapters.MLP) or not m.experts else kind
    adapter = random_adapter(m, kind, seed, dtype)
    if not expressible(m, kind):
        with pytest.raises(UserError, match=r"PEFT has no others of experts|as PEFT has no halves that experts share"):
            peft.to_peft(m, adapter, "base")
        return
    folder = tmp_path_factory.mktemp("adapter")
    peft.write(folder, peft.to_peft(m, adapter, "base"))
    assert same(peft.from_peft(m, peft.read(folder)), adapter)


def stacked(m: Shape, adapter: Adapter, doubled: bool) -> peft.Files:
    """In the form PEFT writes of parameters, put together entry by entry."""
    rank, tensors = adapter.kind.rank, {}
    files = peft.to_peft(m, adapter, "base")
    attention = {name: value for name, value in files.tensors.items() if "self_attn" in name}
    for layer in range(m.layers):
        front = f"base_model.model.model.layers.{layer}.mlp.experts"
        wide = rank * (2 if doubled else 1)
        a_gate_up, b_gate_up = np.zeros((m.experts * wide, m.hidden)), np.zeros((2 * m.expert_width, wide * m.experts))
        a_down, b_down = np.zeros((m.experts * rank, m.expert_width)), np.zeros((m.hidden, rank * m.experts))
        for e in range(m.experts):
            for position, target in enumerate(("gate_proj", "up_proj")):
                own = adapter.values[f"layers.{layer}.experts.{e}.{target}.a"], adapter.values[f"layers.{layer}.experts.{e}.{target}.b"]
                shift = position * rank if doubled else 0
                for r in range(rank):
                    a_gate_up[e * wide + shift + r] = own[0][r]
                    b_gate_up[position * m.expert_width : (position + 1) * m.expert_width, (shift + r) * m.experts + e] = own[1][:, r]
            for r in range(rank):
                a_down[e * rank + r] = adapter.values[f"layers.{layer}.experts.{e}.down_proj.a"][r]
                b_down[:, r * m.experts + e] = adapter.values[f"layers.{layer}.experts.{e}.down_proj.b"][:, r]
        for name, value in (("base_layer.lora_A", a_gate_up), ("base_layer.lora_B", b_gate_up), ("lora_A", a_down), ("lora_B", b_down)):
            tensors[f"{front}.{name}.weight"] = value.astype(np.float32)
    config = {**files.config, "target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "mlp.experts.down_proj"]}
    if doubled:
        config |= {"rank_pattern": {r".*\.gate_up_proj": 2 * rank}, "alpha_pattern": {r".*\.gate_up_proj": 2 * adapter.kind.alpha}}
    return peft.Files(config, "float32", attention | tensors)


@given(st.integers(1, 3), st.integers(0, 99), st.booleans())
@settings(max_examples=30, deadline=None)
def test_stacked_experts_are_taken_apart(rank, seed, doubled) -> None:  # type: ignore[no-untyped-def]
    m = shape()
    adapter = random_adapter(m, Kind(("q_proj", *adapters.MLP), rank, 4.0), seed)
    if not doubled:
        for name in list(adapter.values):
            adapter.values[name.replace("gate_proj.a", "up_proj.a")] = adapter.values[name]  # type: ignore[index]
    assert same(peft.from_peft(m, stacked(m, adapter, doubled)), adapter)


def test_a_doubled_rank_that_is_used_is_refused() -> None:
    m = shape()
    files = stacked(m, random_adapter(m, ALL, 0), doubled=True)
    name = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight"
    files.tensors[name][0, -1] = 1.0
    with pytest.raises(UserError, match=r"base_layer\.lora_B\.weight: got values there, expected zeros .* train gate_up_proj with rank 6"):
        peft.from_peft(m, files)


def test_features_and_modules_that_are_not_carried_over_are_named() -> None:
    m = shape()
    files = peft.to_peft(m, random_adapter(m, ALL, 0), "base")

    def refused(match: str, config: dict[str, Any] | None = None, tensors: dict[str, np.ndarray] | None = None) -> None:
        with pytest.raises(UserError, match=match):
            peft.from_peft(m, peft.Files({**files.config, **(config or {})}, files.dtype, {**files.tensors, **(tensors or {})}))

    refused("peft_type in adapter_config.json: got IA3, expected LORA", {"peft_type": "IA3"})
    refused("use_rslora in adapter_config.json: got True, expected false", {"use_rslora": True})
    refused("use_dora", {"use_dora": True})
    refused(r"modules_to_save .*got \['lm_head'\], expected null", {"modules_to_save": ["lm_head"]})
    refused("rank_pattern .*got 8 for q_proj, expected 3 for all layers", {"rank_pattern": {"q_proj": 8}})
    peft.from_peft(m, peft.Files({**files.config, "modules_to_save": []}, files.dtype, files.tensors))
    half = np.zeros((3, 8), np.float32)
    for module in ("lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert.up_proj"):
        refused(rf"{module}.*cannot have an adapter here", None, {f"base_model.model.{module}.lora_A.weight": half})
    refused(r"got layers\.7\.q_proj\.a", None, {"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": half})
    refused("target_parameters .*got none", None, {"base_model.model.model.layers.0.mlp.experts.lora_A.weight": half})
    parameters = {"target_parameters": ["mlp.experts.down_proj"]}
    refused(r"experts\.lora_A\.weight: got \(3, 8\), expected \(12, 6\), of 4 experts", parameters, {
        "base_model.model.model.layers.0.mlp.experts.lora_A.weight": half
    })  # fmt: skip


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
        peft.check_features(
            {**PLAIN, **dict.fromkeys(MEANT - {"r", "lora_alpha"}), "init_lora_weights": init, "new": None, "loftq_config": {}}
        )
    with pytest.raises(UserError, match=r"unheard_of in adapter_config\.json: got 1, expected null"):
        peft.check_features({**PLAIN, "unheard_of": 1})


def test_what_training_starts_from_fits_it(tmp_path: Path) -> None:
    m = shape()
    alike = adapters.expanded(m, random_adapter(m, Kind(TARGETS, 3, 6.0, "shared_outer"), 1))
    peft.write(tmp_path, peft.to_peft(m, alike, "Qwen/Qwen3-30B-A3B"))

    def start(kind: Kind, base: str = "/models/Qwen3-30B-A3B", limit: int = 8, of: Shape = m) -> Adapter:
        return peft.start_from(tmp_path, of, kind, base, limit)

    assert same(start(ALL), alike)
    assert same(adapters.expanded(m, start(Kind(TARGETS, 3, 6.0, "shared_outer"))), alike)
    for kind, match in (
        (Kind(TARGETS, 2, 6.0), r"rank of the adapter in .*: got 3, expected 2; set lora\.rank to 3"),
        (Kind(TARGETS, 3, 4.0), r"alpha of .*: got 6, expected 4\.0; set lora\.alpha to 6"),
        (Kind(("q_proj",), 3, 6.0), r"targets of .*; set lora\.targets to q_proj, k_proj"),
    ):
        with pytest.raises(UserError, match=match):
            start(kind)
    with pytest.raises(UserError, match="adapter's rank: got 3, expected at most the engines' 2"):
        start(ALL, limit=2)
    with pytest.raises(UserError, match=r"base model .*: got Qwen/Qwen3-30B-A3B, expected /models/Qwen3-4B; if they are the same"):
        start(ALL, base="/models/Qwen3-4B")
    with pytest.raises(UserError, match=r"got float32 \(3, 8\), expected float32 \(3, 12\); the model has 2 layers, hidden size 12"):
        start(ALL, of=shape(hidden=12))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    m = shape()
    with pytest.raises(DataError, match=r"got no adapter_config\.json"):
        peft.read(tmp_path)
    peft.write(tmp_path, peft.to_peft(m, random_adapter(m, ALL, 0), "base"))
    whole = (tmp_path / peft.MODEL).read_bytes()
    (tmp_path / peft.MODEL).write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"adapter_model\.safetensors.*expected a safetensors file"):
        peft.read(tmp_path)
    (tmp_path / peft.MODEL).write_bytes(whole)
    for text, match in (("{", "expected valid JSON"), ("[]", "no numbers r"), (json.dumps({"r": "4", "lora_alpha": 8}), "no numbers r")):
        (tmp_path / peft.CONFIG).write_text(text)
        with pytest.raises(DataError, match=match):
            peft.read(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Shape]:

    path = tmp_path_factory.mktemp("model") / "tiny"
    make_model(path, MadeModel(layers=2, experts=4), seed=0)
    return path, qwen3_moe.FAMILY.shape_of(load_hf_config(path))


def logits(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return np.asarray(model(torch.arange(20, 60)[None]).logits[0])


@pytest.mark.parametrize("targets", [TARGETS, ("q_proj", "down_proj"), ("k_proj", "o_proj")])
def test_peft_computes_what_the_merged_weights_do(model: tuple[Path, Shape], tmp_path: Path, targets: tuple[str, ...]) -> None:
    path, m = model
    same_by_peft(path, m, random_adapter(m, Kind(targets, 3, 6.0), 0), tmp_path)


@pytest.mark.parametrize("family", ["mixtral", "glm", "deepseek", "moonlight"])
def test_peft_computes_what_the_merged_weights_of_every_family_do(tmp_path: Path, family: str) -> None:
    path = families.write(tmp_path / "model", family)
    hf = load_hf_config(path)
    m = family_of(hf).shape_of(hf)
    same_by_peft(path, m, random_adapter(m, Kind(m.adapters, 3, 6.0), 0), tmp_path)


def same_by_peft(path: Path, m: Shape, adapter: Adapter, tmp_path: Path) -> None:
    from peft import PeftModel

    peft.write(tmp_path, peft.to_peft(m, adapter, str(path)))
    theirs = PeftModel.from_pretrained(load(path), tmp_path)
    merged = logits(merge(load(path), m, adapter))
    assert np.abs(logits(theirs) - merged).max() < 1e-4
    assert np.abs(logits(load(path)) - merged).max() > 0.1
    # PEFT saves it in the stacked form, with gate and up in one half of twice the rank.
    theirs.save_pretrained(tmp_path / "again")
    assert same(peft.from_peft(m, peft.read(tmp_path / "again")), adapter)


@pytest.mark.parametrize("parameters", [("gate_up_proj", "down_proj"), ("down_proj",), ("gate_up_proj",)])
def test_adapters_of_parameters_mean_here_what_they_mean_to_peft(
    model: tuple[Path, Shape], tmp_path: Path, parameters: tuple[str, ...]
) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    path, m = model
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
