"""Checkpoint and Megatron layouts of all families against those who own them: transformers' files, Megatron's rank order and stages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import MODELS, QWEN3_MOE
from reshard_ranks import filled, numbered

from asyncmoe.models import MegatronParallel, family_of
from asyncmoe.reshard import LocalTransport, exchange, plan

HF = QWEN3_MOE
FAMILY = family_of(HF)


GRIDS = [
    MegatronParallel(),
    MegatronParallel(tp=2, etp=2),
    MegatronParallel(pp=4, te=True),
    MegatronParallel(dp=2, ep=2),
    MegatronParallel(tp=2, ep=2),
    MegatronParallel(tp=4, ep=2, etp=2, dp=2),
    MegatronParallel(tp=2, ep=4, etp=1, dp=4, te=True),
    MegatronParallel(dp=3),
    MegatronParallel(pp=2, vpp=2),
    MegatronParallel(tp=2, pp=2, ep=2, dp=2, te=True, vpp=2),
    MegatronParallel(pp=2, first_layers=3, last_layers=1),
    MegatronParallel(pp=3, last_layers=2, dp=2, ep=2),
]

RICHEST = MegatronParallel(tp=2, pp=2, ep=2, dp=2, te=True, vpp=2)
IN_ALL_WAYS = ("qwen3_moe", "deepseek")
layouts = pytest.mark.parametrize(
    ("hf", "grid"),
    [
        pytest.param(hf, grid, id=f"{name}-{grid}", marks=[] if grid == RICHEST or name in IN_ALL_WAYS else pytest.mark.thorough)
        for name, hf in MODELS.items()
        for grid in GRIDS
    ],
)
"""Every model divided in every way at once, and one of each kind of attention in each way; with --thorough all in all ways."""


def dealt(grid: MegatronParallel, layers: int) -> list[list[tuple[str, int]]]:
    """For each stage (name of a layer, its number): layers dealt out to the stages, in as many rounds as there are chunks."""
    given = [grid.first_layers, *[None] * (grid.pp - 2), grid.last_layers] if grid.pp > 1 else [None]
    equal = (layers - sum(n or 0 for n in given)) // max(1, given.count(None))
    counts, deck = [n or equal for n in given], iter(range(layers))
    stages: list[list[tuple[str, int]]] = [[] for _ in counts]
    for chunk in range(grid.vpp):
        for stage, count in zip(stages, counts, strict=True):
            front = f"chunks.{chunk}." if grid.vpp > 1 else ""
            stage += [(f"{front}decoder.layers.{i}", next(deck)) for i in range(count // grid.vpp)]
    return stages


def derived(hf: dict[str, Any], grid: MegatronParallel, rank: int, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A rank's Megatron parameters, by reshaping and concatenating whole Hugging Face tensors (not by boxes)."""
    tp, pp = rank % grid.tp, rank // (grid.tp * grid.dp)
    tied = hf.get("tie_word_embeddings", False)
    out: dict[str, torch.Tensor] = {}
    front, back = ("chunks.0.", f"chunks.{grid.vpp - 1}.") if grid.vpp > 1 else ("", "")
    if pp == 0:
        out[f"{front}embedding.word_embeddings.weight"] = weights["model.embed_tokens.weight"].chunk(grid.tp)[tp]
    if pp == grid.pp - 1:
        out[f"{back}decoder.final_layernorm.weight"] = weights["model.norm.weight"]
        if not tied or grid.pp > 1:
            out[f"{back}output_layer.weight"] = weights["model.embed_tokens.weight" if tied else "lm_head.weight"].chunk(grid.tp)[tp]
    for name, layer in dealt(grid, hf["num_hidden_layers"])[pp]:
        w = {k.removeprefix(f"model.layers.{layer}."): v for k, v in weights.items() if k.startswith(f"model.layers.{layer}.")}
        attention = latent_attention if "kv_lora_rank" in hf else grouped_attention
        made = attention(hf, grid, tp, w) | mlp(grid, rank, renamed(w))
        out |= {f"{name}.{inner}": value for inner, value in made.items()}
    return out


def renamed(w: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Mixtral's names as most families have them."""
    parts = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    return {".".join(parts.get(part, part) for part in name.split(".")): value for name, value in w.items()}


def grouped_attention(hf: dict[str, Any], grid: MegatronParallel, tp: int, w: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    head = hf.get("head_dim", hf["hidden_size"] // hf["num_attention_heads"])
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in w:
            by_group = [w[f"self_attn.{x}_proj.{kind}"].unflatten(0, (hf["num_key_value_heads"], -1, head)) for x in "qkv"]
            out[f"self_attention.linear_qkv.{kind}"] = torch.cat(by_group, 1).flatten(0, 2).chunk(grid.tp)[tp]
    out["self_attention.linear_proj.weight"] = w["self_attn.o_proj.weight"].chunk(grid.tp, 1)[tp]
    out |= {f"self_attention.{x}_layernorm.weight": w[f"self_attn.{x}_norm.weight"] for x in "qk" if f"self_attn.{x}_norm.weight" in w}
    out["self_attention.linear_qkv.layer_norm_weight" if grid.te else "input_layernorm.weight"] = w["input_layernorm.weight"]
    return out


def latent_attention(hf: dict[str, Any], grid: MegatronParallel, tp: int, w: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {"input_layernorm.weight": w["input_layernorm.weight"]}
    out["self_attention.linear_proj.weight"] = w["self_attn.o_proj.weight"].chunk(grid.tp, 1)[tp]
    sources = {"q": ("q_a_proj", "q_a_layernorm", "q_b_proj"), "kv": ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")}
    for part, (down, norm, up) in sources.items():
        if part == "q" and hf["q_lora_rank"] is None:
            out["self_attention.linear_q_proj.weight"] = w["self_attn.q_proj.weight"].chunk(grid.tp)[tp]
            continue
        out[f"self_attention.linear_{part}_down_proj.weight"] = w[f"self_attn.{down}.weight"]
        name = f"linear_{part}_up_proj.layer_norm_weight" if grid.te else f"{part}_layernorm.weight"
        out[f"self_attention.{name}"] = w[f"self_attn.{norm}.weight"]
        out[f"self_attention.linear_{part}_up_proj.weight"] = w[f"self_attn.{up}.weight"].chunk(grid.tp)[tp]
    return out


def mlp(grid: MegatronParallel, rank: int, w: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    dense = "mlp.gate.weight" not in w
    norm = "mlp.linear_fc1.layer_norm_weight" if grid.te and dense else "pre_mlp_layernorm.weight"
    out = {norm: w["post_attention_layernorm.weight"]}

    def gated(name: str, source: str, fc1: str, fc2: str, parts: int) -> None:
        gate, up, down = (w[f"{source}{x}_proj.weight"] for x in ("gate", "up", "down"))
        out[f"{name}{fc1}"] = torch.cat([gate.chunk(parts)[rank % parts], up.chunk(parts)[rank % parts]])
        out[f"{name}{fc2}"] = down.chunk(parts, 1)[rank % parts]

    if dense:
        gated("mlp.", "mlp.", "linear_fc1.weight", "linear_fc2.weight", grid.tp)
        return out
    out["mlp.router.weight"] = w["mlp.gate.weight"]
    if "mlp.gate.e_score_correction_bias" in w:
        out["mlp.router.expert_bias"] = w["mlp.gate.e_score_correction_bias"]
    if "mlp.shared_experts.up_proj.weight" in w:
        gated("mlp.shared_experts.", "mlp.shared_experts.", "linear_fc1.weight", "linear_fc2.weight", grid.tp)
    count = sum(name.startswith("mlp.experts.") and name.endswith("up_proj.weight") for name in w) // grid.ep
    for e in range(count):
        one = [f"linear_fc{i}.weight{e}" if grid.te else f"local_experts.{e}.linear_fc{i}.weight" for i in (1, 2)]
        gated("mlp.experts.", f"mlp.experts.{rank // grid.etp % grid.ep * count + e}.", one[0], one[1], grid.etp)
    return out


@layouts
def test_megatron_parameters_are_the_reshaped_and_concatenated_ones(grid: MegatronParallel, hf: dict[str, Any]) -> None:
    family = family_of(hf)
    tensors, checkpoint = family.tensors(hf), family.hf_layout(hf, "int32")
    weights = {name: torch.from_numpy(array) for name, array in filled(checkpoint, numbered(tensors)).items()}
    for rank in range(grid.world):
        layout = family.megatron_layout(hf, grid, rank, "int32")
        got = {name: torch.full(storage.shape, -1, dtype=getattr(torch, storage.dtype)) for name, storage in layout.storages.items()}
        exchange(plan(tensors, [checkpoint.at(rank)], [layout]), LocalTransport(rank), weights, got)
        expected = derived(hf, grid, rank, weights)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(got[name], value), name


STAGES = [
    (8, MegatronParallel(pp=2, vpp=4)),
    (24, MegatronParallel(pp=4, vpp=3)),
    (7, MegatronParallel(pp=3, first_layers=1)),
    (94, MegatronParallel(pp=4, first_layers=23, last_layers=23)),
    (61, MegatronParallel(pp=4, last_layers=13)),
    (5, MegatronParallel(pp=2, first_layers=3, last_layers=2)),
    (20, MegatronParallel(pp=4, vpp=2, first_layers=2, last_layers=6)),
]
PARALLEL = [grid for grid in GRIDS if grid.world > 1]
SCRIPT = f"""
import asyncmoe.platform.megatron as platform
platform.prepare()
import json, torch
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
groups = []
for tp, pp, ep, etp, dp in {[(g.tp, g.pp, g.ep, g.etp, g.dp) for g in PARALLEL]}:
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    expert = RankGenerator(tp=etp, ep=ep, dp=tp * dp // (etp * ep), pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    groups.append([dense.get_ranks(kind) for kind in ("tp", "pp")] + [expert.get_ranks(kind) for kind in ("tp", "ep", "dp")])
stages = []
for layers, pp, vpp, first, last in {[(n, g.pp, g.vpp, g.first_layers, g.last_layers) for n, g in STAGES]}:
    vp = vpp if vpp > 1 else None
    config = TransformerConfig(
        num_layers=layers, hidden_size=8, num_attention_heads=2, pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32,
        virtual_pipeline_model_parallel_size=vp, num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last,
    )
    stages.append([
        [
            (get_transformer_layer_offset(config, v if vp else None, rank), get_num_layers_to_build(config, v if vp else None, rank))
            for v in range(vpp)
        ]
        for rank in range(pp)
    ])
print("RESULT" + json.dumps([groups, stages]))
"""


@pytest.fixture(scope="module")
def of_megatron() -> list[Any]:
    """What Megatron's own RankGenerator, get_num_layers_to_build and get_transformer_layer_offset say, in a process of their own because
    importing Megatron changes torch: its groups of `PARALLEL`, its layers of `STAGES`."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said: list[Any] = json.loads(done.stdout.split("RESULT", 1)[1])
    return said


def test_ranks_are_numbered_as_megatron_numbers_them(of_megatron: list[Any]) -> None:
    for grid, listed in zip(PARALLEL, of_megatron[0], strict=True):
        *divided, replicas = listed
        for place, members in zip((grid.tp_rank, grid.pp_rank, grid.etp_rank, grid.ep_rank), divided, strict=True):
            for group in members:
                assert [place(rank) for rank in group] == list(range(len(group))), (grid, place.__name__, group)
        for group in replicas:
            assert len({(grid.etp_rank(rank), grid.ep_rank(rank), grid.pp_rank(rank)) for rank in group}) == 1, (grid, group)


def test_layers_of_stages_are_those_megatron_builds(of_megatron: list[Any]) -> None:
    for (layers, grid), stages in zip(STAGES, of_megatron[1], strict=True):
        for stage, chunks in enumerate(stages):
            assert [[chunk.start, len(chunk)] for chunk in grid.chunk_layers(layers, stage)] == chunks, (layers, grid, stage)


@pytest.mark.parametrize(
    "hf", [*MODELS.values(), {**HF, "decoder_sparse_step": 2, "mlp_only_layers": [3]}], ids=[*MODELS, "qwen3_moe-other-dense-layers"]
)
def test_checkpoint_names_are_those_transformers_writes(tmp_path: Path, hf: dict[str, Any]) -> None:
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {k: v for k, v in hf.items() if k not in ("model_type", "rope_theta")}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(hf["model_type"], **settings)).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {name: storage.shape for name, storage in family_of(saved).hf_layout(saved, "float32").storages.items()} == written


def test_megatron_config_builds_a_transformer_config() -> None:
    transformer, gpt = FAMILY.megatron_config(HF)
    assert transformer["moe_layer_freq"] == [1, 0, 1, 1]
    assert transformer["moe_router_pre_softmax"] is False
    assert gpt["rotary_base"] == 10000.0
    newer = {**HF, "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}}
    assert FAMILY.megatron_config(newer)[1]["rotary_base"] == 5e6
    assert FAMILY.megatron_config({**HF, "norm_topk_prob": False})[0]["moe_router_pre_softmax"] is True
