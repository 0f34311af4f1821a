"""Qwen3-MoE's layouts against those who own them: transformers' files, SGLang's loader, Megatron's rank order."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reshard_ranks import blank, filled, numbered, run_ranks

from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.models.qwen3_moe import hf_name
from asyncmoe.reshard import LocalTransport, exchange, plan

HF: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 72,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "rope_theta": 10000.0,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 1,
}
ORACLES = Path(__file__).parents[3] / "shared" / "data" / "sglang_layouts"
FAMILY = family_of(HF)


def variant(**changes: object) -> dict[str, Any]:
    return {**HF, **changes}


GRIDS = [
    MegatronParallel(),
    MegatronParallel(tp=2, etp=2),
    MegatronParallel(pp=2),
    MegatronParallel(pp=4, te=True),
    MegatronParallel(dp=2, ep=2),
    MegatronParallel(tp=2, ep=2),
    MegatronParallel(tp=2, pp=2, ep=2, dp=2, te=True),
    MegatronParallel(tp=4, ep=2, etp=2, dp=2),
    MegatronParallel(tp=2, ep=4, etp=1, dp=4, te=True),
    MegatronParallel(dp=3),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_from_checkpoint_to_megatron_and_back(grid: MegatronParallel, tied: bool) -> None:
    hf = variant(tie_word_embeddings=tied)
    tensors, checkpoint = FAMILY.tensors(hf), FAMILY.hf_layout(hf, "int32")
    values = numbered(tensors)
    on_disk = filled(checkpoint, values)
    ranks = [FAMILY.megatron_layout(hf, grid, rank, "int32") for rank in range(grid.world)]
    held = {}
    for layout in ranks:
        held[layout.rank] = blank(layout)
        exchange(plan(tensors, [checkpoint.at(layout.rank)], [layout]), LocalTransport(layout.rank), on_disk, held[layout.rank])
    back = blank(checkpoint)
    run_ranks(plan(tensors, ranks, [checkpoint]), held, {0: back})
    for name, expected in on_disk.items():
        np.testing.assert_array_equal(back[name], expected, err_msg=name)


def derived(hf: dict[str, Any], grid: MegatronParallel, rank: int, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A rank's Megatron parameters, by reshaping and concatenating whole Hugging Face tensors (not by boxes)."""
    tp, etp, ep, pp = rank % grid.tp, rank % grid.etp, rank // grid.etp % grid.ep, rank // (grid.tp * grid.dp)
    groups, d = hf["num_key_value_heads"], hf["head_dim"]
    per_stage, per_ep = hf["num_hidden_layers"] // grid.pp, hf["num_experts"] // grid.ep
    tied = hf.get("tie_word_embeddings", False)
    out: dict[str, torch.Tensor] = {}
    if pp == 0:
        out["embedding.word_embeddings.weight"] = weights["model.embed_tokens.weight"].chunk(grid.tp)[tp]
    if pp == grid.pp - 1:
        out["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
        if not tied or grid.pp > 1:
            out["output_layer.weight"] = weights["model.embed_tokens.weight" if tied else "lm_head.weight"].chunk(grid.tp)[tp]
    for local in range(per_stage):
        layer = pp * per_stage + local
        w = {k.removeprefix(f"model.layers.{layer}."): v for k, v in weights.items() if k.startswith(f"model.layers.{layer}.")}
        m = f"decoder.layers.{local}"
        q, k, v = (w[f"self_attn.{x}_proj.weight"].unflatten(0, (groups, -1, d)) for x in "qkv")
        out[f"{m}.self_attention.linear_qkv.weight"] = torch.cat([q, k, v], 1).flatten(0, 2).chunk(grid.tp)[tp]
        out[f"{m}.self_attention.linear_proj.weight"] = w["self_attn.o_proj.weight"].chunk(grid.tp, 1)[tp]
        for x in "qk":
            out[f"{m}.self_attention.{x}_layernorm.weight"] = w[f"self_attn.{x}_norm.weight"]
        attn_norm = "self_attention.linear_qkv.layer_norm_weight" if grid.te else "input_layernorm.weight"
        out[f"{m}.{attn_norm}"] = w["input_layernorm.weight"]
        dense = "mlp.gate.weight" not in w
        mlp_norm = "mlp.linear_fc1.layer_norm_weight" if grid.te and dense else "pre_mlp_layernorm.weight"
        out[f"{m}.{mlp_norm}"] = w["post_attention_layernorm.weight"]
        if dense:
            gate, up, down = (w[f"mlp.{x}_proj.weight"] for x in ("gate", "up", "down"))
            out[f"{m}.mlp.linear_fc1.weight"] = torch.cat([gate.chunk(grid.tp)[tp], up.chunk(grid.tp)[tp]])
            out[f"{m}.mlp.linear_fc2.weight"] = down.chunk(grid.tp, 1)[tp]
            continue
        out[f"{m}.mlp.router.weight"] = w["mlp.gate.weight"]
        for e in range(per_ep):
            gate, up, down = (w[f"mlp.experts.{ep * per_ep + e}.{x}_proj.weight"] for x in ("gate", "up", "down"))
            fc1, fc2 = (
                (f"linear_fc1.weight{e}", f"linear_fc2.weight{e}")
                if grid.te
                else (f"local_experts.{e}.linear_fc1.weight", f"local_experts.{e}.linear_fc2.weight")
            )
            out[f"{m}.mlp.experts.{fc1}"] = torch.cat([gate.chunk(grid.etp)[etp], up.chunk(grid.etp)[etp]])
            out[f"{m}.mlp.experts.{fc2}"] = down.chunk(grid.etp, 1)[etp]
    return out


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_megatron_parameters_are_the_reshaped_and_concatenated_ones(grid: MegatronParallel, tied: bool) -> None:
    hf = variant(tie_word_embeddings=tied)
    tensors, checkpoint = FAMILY.tensors(hf), FAMILY.hf_layout(hf, "int32")
    weights = {name: torch.from_numpy(array) for name, array in filled(checkpoint, numbered(tensors)).items()}
    for rank in range(grid.world):
        layout = FAMILY.megatron_layout(hf, grid, rank, "int32")
        got = {name: torch.full(storage.shape, -1, dtype=torch.int32) for name, storage in layout.storages.items()}
        exchange(plan(tensors, [checkpoint.at(rank)], [layout]), LocalTransport(rank), weights, got)
        expected = derived(hf, grid, rank, weights)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(got[name], value), name


def test_ranks_are_numbered_as_megatron_numbers_them() -> None:
    """Megatron's own RankGenerator, in a process of its own because importing Megatron changes torch."""
    grids = [grid for grid in GRIDS if grid.world > 1]
    script = f"""
import asyncmoe.platform.megatron as platform
platform.prepare()
from megatron.core.parallel_state import RankGenerator
import json
from asyncmoe.models import MegatronParallel
out = []
for g in {[(g.tp, g.pp, g.ep, g.etp, g.dp) for g in grids]}:
    tp, pp, ep, etp, dp = g
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    expert = RankGenerator(tp=etp, ep=ep, dp=tp * dp // (etp * ep), pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    out.append([dense.get_ranks(kind) for kind in ("tp", "dp", "pp")] + [expert.get_ranks(kind) for kind in ("tp", "ep", "dp")])
print("RESULT" + json.dumps(out))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    groups = json.loads(done.stdout.split("RESULT", 1)[1])
    for grid, listed in zip(grids, groups, strict=True):
        places = (grid.tp_rank, grid.dp_rank, grid.pp_rank, grid.etp_rank, grid.ep_rank, grid.expert_dp_rank)
        for place, members in zip(places, listed, strict=True):
            for group in members:
                assert [place(rank) for rank in group] == list(range(len(group))), (grid, place.__name__, group)


def oracle_cases() -> list[tuple[str, str]]:
    names = ("tp1", "tp2", "tp4", "tp8", "tp4_ep4", "tp4_ep2")
    return [("qwen3_moe", name) for name in names] + [("check_qwen3_moe", "tp2")]


@pytest.mark.parametrize(("family", "case"), oracle_cases())
def test_engine_parameters_are_those_sglang_loads(family: str, case: str) -> None:
    """Element by element against what SGLang's own loader did with a checkpoint of numbered elements."""
    file = ORACLES / "layouts" / family / f"{case}.json.gz"
    if not file.is_file():
        pytest.skip(f"no recorded SGLang layouts at {ORACLES}")
    hf = json.loads((ORACLES / "configs" / family / "config.json").read_text())
    document = json.loads(gzip.decompress(file.read_bytes()))
    tensors, checkpoint = FAMILY.tensors(hf), FAMILY.hf_layout(hf, "int32")
    on_disk = filled(checkpoint, numbered(tensors))
    assert {name: list(array.shape) for name, array in on_disk.items()} == dict(document["hf_tensors"])
    parallel = EngineParallel(len(document["ranks"]), document["server_args"].get("ep_size", 1))
    for described in document["ranks"]:
        rank = described["rank"]
        layout = FAMILY.sglang_layout(hf, parallel, rank, "int32")
        got = blank(layout)
        exchange(plan(tensors, [checkpoint.at(rank)], [layout]), LocalTransport(rank), on_disk, got)
        expected = {n: e for n, e in described["params"].items() if e["kind"] == "param"}
        assert got.keys() == expected.keys()
        for name, entry in expected.items():
            np.testing.assert_array_equal(got[name], loaded(entry, document["hf_tensors"], on_disk), err_msg=name)


def loaded(entry: dict[str, Any], names: list[tuple[str, list[int]]], on_disk: dict[str, np.ndarray]) -> np.ndarray:
    array = np.full(entry["shape"], -2, np.int32)
    for start, extent, tensor, *place in entry["boxes"]:
        view = array[tuple(slice(s, s + n) for s, n in zip(start, extent, strict=True))]
        if tensor == "zero":
            view[...] = 0
        else:
            offset, strides = place
            flat = on_disk[names[tensor][0]].reshape(-1)
            view[...] = np.lib.stride_tricks.as_strided(flat[offset:], extent, [4 * s for s in strides])
    return array


@pytest.mark.parametrize(
    ("grid", "engine"),
    [
        (MegatronParallel(tp=2, pp=2, ep=2, dp=2), EngineParallel(2, 2)),
        (MegatronParallel(tp=2, ep=2, etp=2, dp=2, te=True), EngineParallel(8, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True])
def test_megatron_straight_to_engine(grid: MegatronParallel, engine: EngineParallel, tied: bool) -> None:
    hf = variant(tie_word_embeddings=tied)
    tensors = FAMILY.tensors(hf)
    values = numbered(tensors)
    ranks = [FAMILY.megatron_layout(hf, grid, rank, "int32") for rank in range(grid.world)]
    engines = [FAMILY.sglang_layout(hf, engine, rank, "int32").at(100 + rank) for rank in range(engine.tp)]
    made = plan(tensors, ranks, engines)
    got = {layout.rank: blank(layout) for layout in engines}
    run_ranks(made, {layout.rank: filled(layout, values) for layout in ranks}, got)
    for layout in engines:
        for name, expected in filled(layout, values).items():
            np.testing.assert_array_equal(got[layout.rank][name], expected, err_msg=name)
    assert made.wire_bytes == 4 * sum(p.box.size for layout in engines for p in layout.pieces if p.tensor in tensors)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"decoder_sparse_step": 2, "mlp_only_layers": [3]}], ids=str)
def test_checkpoint_names_are_those_transformers_writes(tmp_path: Path, changes: dict[str, Any]) -> None:
    from safetensors import safe_open
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    hf = variant(**changes)
    settings = {k: v for k, v in hf.items() if k not in ("model_type", "rope_theta")}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings)).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {name: storage.shape for name, storage in FAMILY.hf_layout(saved, "float32").storages.items()} == written


def test_names_of_tensors() -> None:
    assert hf_name("layers.3.experts.17.up") == "model.layers.3.mlp.experts.17.up_proj.weight"
    assert hf_name("layers.3.router") == "model.layers.3.mlp.gate.weight"


def test_megatron_config_builds_a_transformer_config() -> None:
    transformer, gpt = FAMILY.megatron_config(HF)
    assert transformer["moe_layer_freq"] == [1, 0, 1, 1]
    assert transformer["moe_router_pre_softmax"] is False
    assert gpt["rotary_base"] == 10000.0
    newer = variant(rope_parameters={"rope_theta": 5e6, "rope_type": "default"})
    assert FAMILY.megatron_config(newer)[1]["rotary_base"] == 5e6
    assert FAMILY.megatron_config(variant(norm_topk_prob=False))[0]["moe_router_pre_softmax"] is True
