"""The refusals of `models.check` and their messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_cases import MODELS
from model_cases import QWEN3 as DENSE
from model_cases import QWEN3_MOE as WITH_A_DENSE_LAYER
from transformers import AutoConfig

from asyncmoe import models
from asyncmoe.config import Config
from asyncmoe.errors import ConfigError, DataError, UserError
from asyncmoe.models import EngineParallel, MegatronParallel
from asyncmoe.models.lora import halves
from asyncmoe.models.lora.adapter import Kind
from tests.configs import minimal

YARN = MODELS["deepseek"]["rope_parameters"]
HF = {**WITH_A_DENSE_LAYER, "mlp_only_layers": []}


def config(trainer: dict[str, int] | None = None, engines: dict[str, int] | None = None) -> Config:
    return minimal(trainer=trainer or {}, engines=engines or {})


@pytest.mark.parametrize(
    ("trainer", "engines"),
    [
        ({"ranks": 8, "tp": 2, "pp": 2, "ep": 4}, {"tp": 4, "ep": 2}),
        ({"ranks": 3, "pp": 3, "first_stage_layers": 1, "last_stage_layers": 2}, {}),
        ({"ranks": 4, "pp": 4}, {"tp": 8, "ep": 8}),  # more engine ranks than key heads
    ],
)
def test_possible_sizes(trainer: dict[str, int], engines: dict[str, int]) -> None:
    models.check(config(trainer, engines), HF)


SIZES: list[tuple[str, dict[str, int], dict[str, int], dict[str, Any], str]] = [
    ("moe", {"ranks": 3, "pp": 3}, {}, {}, "trainer.pp: got 3"),
    ("moe", {"ranks": 8, "tp": 8}, {}, {}, "num_key_value_heads = 4"),
    ("moe", {"ranks": 3, "tp": 3}, {}, {}, "num_attention_heads = 8"),
    ("moe", {"ranks": 4, "tp": 4}, {}, {"vocab_size": 70}, "vocab_size = 70; possible: 1, 2, 5, 7"),
    ("moe", {"ranks": 4, "tp": 4}, {}, {"moe_intermediate_size": 18}, "trainer.etp: got 4"),
    ("moe", {}, {"tp": 3}, {}, "engines.tp: got 3"),
    ("moe", {}, {"tp": 4}, {"num_attention_heads": 24, "num_key_value_heads": 6}, "num_key_value_heads = 6"),
    ("moe", {}, {"tp": 12, "ep": 12}, {"num_attention_heads": 12}, "padded vocab_size = 128"),
    ("moe", {}, {"tp": 8, "ep": 8}, {"num_experts": 12}, "engines.ep: got 8"),
    ("moe", {}, {"tp": 8}, {"moe_intermediate_size": 12}, "engines.tp / engines.ep: got 8"),
    ("dense", {"ranks": 4, "tp": 4}, {}, {"intermediate_size": 30}, "trainer.tp: got 4"),
    ("dense", {}, {"tp": 2, "ep": 2}, {}, "engines.ep: got 2"),
    ("dense", {}, {"tp": 2, "dp_attention": 2}, {"tie_word_embeddings": True}, "engines.dp_attention: got 2"),
    ("moe", {}, {"tp": 12, "dp_attention": 4}, {"num_attention_heads": 8}, "engines.tp / engines.dp_attention: got 3"),
]


@pytest.mark.parametrize(("model", "trainer", "engines", "changes", "words"), SIZES)
def test_impossible_sizes(model: str, trainer: dict[str, int], engines: dict[str, int], changes: dict[str, Any], words: str) -> None:
    refused(lambda: models.check(config(trainer, engines), {**(DENSE if model == "dense" else HF), **changes}), [words])


@pytest.mark.parametrize(
    ("sections", "got", "most"),
    [
        ({"rollout": {"max_new_tokens": 65}}, "rollout.max_new_tokens: got 65", 64),
        ({"evaluation": {"max_new_tokens": 70}}, "evaluation.max_new_tokens: got 70", 64),
        ({"evaluation": {"sets": {"math": {"path": "m.jsonl", "max_new_tokens": 99}}}}, "evaluation.sets.math.max_new_tokens: got 99", 64),
        ({"rollout": {"max_new_tokens": 33}, "engines": {"args": ["--context-length=32"]}}, "rollout.max_new_tokens: got 33", 32),
    ],
)
def test_responses_fit_the_context(sections: dict[str, Any], got: str, most: int) -> None:
    hf = {**HF, "max_position_embeddings": 64}
    models.check(minimal(rollout={"max_new_tokens": 64}), hf)
    refused(lambda: models.check(minimal(**sections), hf), [got, f"at most {most}, "])


LLAMA3 = MODELS["llama"]["rope_parameters"]
IMPOSSIBLE: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "qwen3_moe": [
        ("hidden_act", {"hidden_act": "gelu"}),
        ("attention_bias", {"attention_bias": True}),
        ("use_sliding_window", {"use_sliding_window": True}),
        ("rope_type", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        ("rope_type", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}),
        ("tie_word_embeddings", {"tie_word_embeddings": True}),
        ("mlp_only_layers", {"mlp_only_layers": [1]}),
        ("decoder_sparse_step", {"decoder_sparse_step": 2}),
        ("num_experts_per_tok", {"num_experts_per_tok": 9}),
        ("hidden_size", {"hidden_size": None}),
    ],
    "qwen3": [("num_attention_heads", {"num_key_value_heads": 3})],
    "mixtral": [
        ("head_dim", {"head_dim": 8}),
        ("hidden_size", {"hidden_size": 52, "head_dim": None}),
        ("head_dim", {"hidden_size": 24, "head_dim": None}),
        ("sliding_window", {"sliding_window": 4096}),
        ("router_jitter_noise", {"router_jitter_noise": 0.1}),
        ("num_local_experts", {"num_local_experts": None}),
    ],
    "llama": [
        ("mlp_bias", {"mlp_bias": True}),
        ("high_freq_factor", {"rope_parameters": {**LLAMA3, "high_freq_factor": 8.0}}),
        ("original_max_position_embeddings", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}}),
        ("factor", {"rope_parameters": {**LLAMA3, "factor": None}}),
        ("rope_type", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
        ("num_attention_heads", {"num_attention_heads": None, "num_key_value_heads": None}),
    ],
    "glm": [
        ("norm_topk_prob", {"norm_topk_prob": False}),
        ("num_experts_per_tok", {"num_experts_per_tok": 1}),
        ("n_group", {"n_group": 3}),
        ("num_experts_per_tok // topk_group", {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}),
        ("first_k_dense_replace", {"first_k_dense_replace": 5}),
        ("n_shared_experts", {"n_shared_experts": -1}),
        ("moe_layer_freq", {"moe_layer_freq": 2}),
        ("head_dim", {"head_dim": 6}),
        ("num_nextn_predict_layers", {"num_nextn_predict_layers": 1}),
    ],
    "deepseek": [
        ("rope_type", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        ("rope_type", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}),
        ("original_max_position_embeddings", {"rope_parameters": {**YARN, "original_max_position_embeddings": None}}),
        ("factor", {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 9}}),
        ("mscale and mscale_all_dim", {"rope_parameters": {**YARN, "mscale": None}}),
        ("attention_factor", {"rope_parameters": {**YARN, "attention_factor": 1.1}}),
        ("truncate", {"rope_parameters": {**YARN, "truncate": False}}),
        ("rope_interleave", {"rope_interleave": False}),
        ("num_key_value_heads", {"num_key_value_heads": 4}),
        ("qk_rope_head_dim", {"qk_rope_head_dim": 3}),
        ("kv_lora_rank", {"kv_lora_rank": None}),
        ("tie_word_embeddings", {"tie_word_embeddings": True}),
        ("scoring_func", {"scoring_func": "softmax"}),
        ("topk_method", {"topk_method": None}),
    ],
}
"""By model, the key that is named and what is changed."""


@pytest.mark.parametrize(("model", "key", "changes"), [(model, *case) for model, cases in IMPOSSIBLE.items() for case in cases])
def test_a_model_that_cannot_be_trained_is_refused_by_its_key(model: str, key: str, changes: dict[str, Any]) -> None:
    hf = HF if model == "qwen3_moe" else MODELS[model]
    models.check(config(), hf)
    refused(lambda: models.check(config(), {**hf, **changes}), [key])


def test_variants_of_families_are_supported() -> None:
    for hf in (*({**MODELS[name], "model_type": "kimi_k2"} for name in ("deepseek", "moonlight")), {**DENSE, "tie_word_embeddings": True}):
        models.check(config(), hf)
    hf = {**MODELS["llama"], "num_key_value_heads": None}
    assert models.family_of(hf).tensors(hf)["layers.0.k"] == (48, 48), "as many key heads as heads"


@pytest.mark.parametrize(("model", "train", "word"), [("qwen3_moe", "full", "no selection bias"), ("glm", "lora", "train is lora")])
def test_a_rule_for_biases_that_there_are_not(model: str, train: str, word: str) -> None:
    rate = {"router_bias_rate": 0.1}
    models.check(minimal(trainer=rate), MODELS["glm"])
    hf = {key: value for key, value in MODELS[model].items() if key != "mlp_only_layers"}
    chosen = minimal(trainer=rate, train=train, lora={"targets": ["q_proj"], "rank": 2})
    refused(lambda: models.check(chosen, hf), ["trainer.router_bias_rate: got 0.1", word])


@pytest.mark.parametrize(
    ("model", "possible", "impossible"),
    [
        ("mixtral", ("q_proj", "o_proj", "up_proj"), ("q_b_proj",)),
        ("deepseek", ("q_b_proj", "o_proj", "up_proj"), ("q_proj",)),
        ("moonlight", ("kv_b_proj", "o_proj", "up_proj"), ("q_proj", "kv_a_proj_with_mqa")),
    ],
)
def test_layers_that_cannot_have_adapters_are_named(model: str, possible: tuple[str, ...], impossible: tuple[str, ...]) -> None:
    shape = models.family_of(MODELS[model]).shape_of(MODELS[model])
    halves.check(Kind(possible, 2, 4.0), shape)
    refused(lambda: halves.check(Kind((*impossible, "o_proj"), 2, 4.0), shape), [f"lora.targets: got {', '.join(impossible)}, "])


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        (MegatronParallel(pp=2, vpp=3), ["trainer.vpp: got 3", "possible: 1, 2, 4"]),
        (MegatronParallel(pp=2, vpp=4, first_layers=2), ["trainer.vpp: got 4", "possible: 1, 2"]),
        (MegatronParallel(pp=3, first_layers=3), ["trainer.first_stage_layers: got 3", "possible: 2, 4, 6"]),
        (MegatronParallel(pp=2, last_layers=8), ["trainer.last_stage_layers: got 8", "1, 2, 3, 4, 5, 6, 7"]),
        (MegatronParallel(pp=2, first_layers=3, last_layers=2), ["trainer.first_stage_layers: got 3", "possible: 6"]),
    ],
    ids=str,
)
def test_impossible_stages(grid: MegatronParallel, words: list[str]) -> None:
    hf = {**DENSE, "num_hidden_layers": 8}
    refused(lambda: models.family_of(hf).check(hf, grid, EngineParallel()), words)
    with pytest.raises(ConfigError, match="pipeline stages: got 8 layers over "):
        grid.chunk_layers(8, 0)


def refused(what: Callable[[], None], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        what()
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize("kind", ["gemma3_text", None])
def test_unknown_family(kind: str | None) -> None:
    with pytest.raises(UserError, match=f"model_type.*{kind}.*expected .*qwen3 or qwen3_moe"):
        models.family_of({"model_type": kind})


@pytest.mark.parametrize("second", [None, "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("first", ["float32", "bfloat16", "float16"])
def test_of_two_dtypes_the_one_that_transformers_takes_is_served(first: str, second: str | None, tmp_path: Path) -> None:
    for given in ({"dtype": first, "torch_dtype": second}, {"torch_dtype": first, "dtype": second}):
        (tmp_path / "config.json").write_text(json.dumps({**HF, **given}))
        wanted = str(AutoConfig.from_pretrained(tmp_path).dtype).removeprefix("torch.")
        hf = models.load_hf_config(tmp_path)
        assert [models.engine_dtype(hf, config(engines=engines).engines) for engines in ({}, {"dtype": "float32"})] == [wanted, "float32"]


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe{", None])
def test_broken_hf_config(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(DataError, match=str(tmp_path)):
        models.load_hf_config(tmp_path)
