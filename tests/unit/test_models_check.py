"""What `models.check` refuses, and how."""

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
from asyncmoe.config import Config, parse
from asyncmoe.errors import ConfigError, DataError, UserError
from asyncmoe.models import EngineParallel, MegatronParallel, checks
from asyncmoe.models.lora import halves
from asyncmoe.models.lora.adapter import Kind

YARN = MODELS["deepseek"]["rope_parameters"]
HF = {**WITH_A_DENSE_LAYER, "mlp_only_layers": []}


def config(trainer: dict[str, int] | None = None, engines: dict[str, int] | None = None) -> Config:
    sections = {"trainer": trainer or {}, "engines": engines or {}}
    return parse({"run": {"dir": "r", "steps": 1}, "model": {"path": "m"}, "task": {"kind": "arithmetic"}, **sections})


@pytest.mark.parametrize(
    ("trainer", "engines"),
    [
        ({}, {}),
        ({"ranks": 8, "tp": 2, "pp": 2, "ep": 4}, {"tp": 4, "ep": 2}),
        ({"ranks": 3, "pp": 3, "first_stage_layers": 1, "last_stage_layers": 2}, {}),
        ({"ranks": 2, "pp": 2, "vpp": 2}, {}),
        ({"ranks": 4, "pp": 4}, {"tp": 8, "ep": 8}),  # more engine ranks than key heads
    ],
)
def test_possible_sizes(trainer: dict[str, int], engines: dict[str, int]) -> None:
    models.check(config(trainer, engines), HF)


@pytest.mark.parametrize(
    ("trainer", "engines", "changes", "words"),
    [
        ({"ranks": 3, "pp": 3}, {}, {}, ["trainer.pp: got 3", "num_hidden_layers = 4", "1, 2, 4"]),
        ({"ranks": 2, "pp": 2, "vpp": 4}, {}, {}, ["trainer.vpp: got 4", "pipeline stage: 2", "possible: 1, 2"]),
        ({"ranks": 3, "pp": 3, "last_stage_layers": 1}, {}, {}, ["trainer.last_stage_layers: got 1", "possible: 2"]),
        ({"ranks": 8, "tp": 8}, {}, {}, ["trainer.tp: got 8", "num_key_value_heads = 4"]),
        ({"ranks": 3, "tp": 3}, {}, {}, ["trainer.tp: got 3", "num_attention_heads = 8"]),
        ({"ranks": 4, "tp": 4}, {}, {"vocab_size": 70}, ["trainer.tp: got 4", "vocab_size = 70", "1, 2, 5, 7"]),
        ({"ranks": 3, "ep": 3}, {}, {}, ["trainer.ep: got 3", "num_experts = 8"]),
        ({"ranks": 4, "tp": 4}, {}, {"moe_intermediate_size": 18}, ["trainer.etp: got 4", "moe_intermediate_size = 18"]),
        ({}, {"tp": 3}, {}, ["engines.tp: got 3", "num_attention_heads = 8"]),
        ({}, {"tp": 4}, {"num_attention_heads": 24, "num_key_value_heads": 6}, ["engines.tp: got 4", "num_key_value_heads = 6"]),
        ({}, {"tp": 12, "ep": 12}, {"num_attention_heads": 12}, ["engines.tp: got 12", "padded vocab_size = 128"]),
        ({}, {"tp": 8, "ep": 8}, {"num_experts": 12}, ["engines.ep: got 8", "num_experts = 12"]),
        ({}, {"tp": 8}, {"moe_intermediate_size": 12}, ["engines.tp / engines.ep: got 8", "moe_intermediate_size = 12"]),
        ({}, {}, {"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]),
        ({}, {}, {"attention_bias": True}, ["attention_bias"]),
        ({}, {}, {"use_sliding_window": True}, ["use_sliding_window"]),
        ({}, {}, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_type", "'yarn'"]),
        ({}, {}, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, ["rope_type", "'linear'"]),
        ({}, {}, {"tie_word_embeddings": True}, ["tie_word_embeddings"]),
        ({}, {}, {"mlp_only_layers": [1]}, ["mlp_only_layers", "got [1]", "expected none"]),
        ({}, {}, {"decoder_sparse_step": 2}, ["decoder_sparse_step", "got [0, 2]", "expected none"]),
        ({}, {}, {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        ({}, {}, {"num_experts_per_tok": 9}, ["num_experts_per_tok", "got 9", "num_experts = 8"]),
        ({}, {}, {"hidden_size": None}, ["hidden_size", "nothing"]),
    ],
)
def test_impossible(trainer: dict[str, int], engines: dict[str, int], changes: dict[str, Any], words: list[str]) -> None:
    refused(lambda: models.check(config(trainer, engines), {**HF, **changes}), words)


@pytest.mark.parametrize(
    ("trainer", "engines", "changes", "words"),
    [
        ({"ranks": 4, "tp": 4}, {}, {"intermediate_size": 30}, ["trainer.tp: got 4", "intermediate_size = 30"]),
        ({}, {"tp": 8}, {"intermediate_size": 12}, ["engines.tp: got 8", "intermediate_size = 12"]),
        ({"ranks": 2, "ep": 2}, {}, {}, ["trainer.ep: got 2", "1, as qwen3 has no experts"]),
        ({}, {"tp": 2, "ep": 2}, {}, ["engines.ep: got 2", "1, as qwen3 has no experts"]),
        ({}, {}, {"attention_bias": True}, ["attention_bias", "qwen3 is supported only"]),
        ({}, {}, {"num_key_value_heads": 3}, ["num_attention_heads", "got 8", "num_key_value_heads = 3"]),
    ],
)
def test_impossible_for_a_dense_model(trainer: dict[str, int], engines: dict[str, int], changes: dict[str, Any], words: list[str]) -> None:
    refused(lambda: models.check(config(trainer, engines), {**DENSE, **changes}), words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 8}, ["head_dim", "got 8", "expected 6", "mixtral is supported only"]),
        ({"hidden_size": 52, "head_dim": None}, ["hidden_size", "got 52", "expected 48"]),
        ({"hidden_size": 24, "head_dim": None}, ["head_dim", "got 3", "even"]),
        ({"sliding_window": 4096}, ["sliding_window", "got 4096", "None"]),
        ({"router_jitter_noise": 0.1}, ["router_jitter_noise", "got 0.1"]),
        ({"num_local_experts": None}, ["num_local_experts", "nothing"]),
    ],
)
def test_impossible_for_mixtral(changes: dict[str, Any], words: list[str]) -> None:
    hf = {**MODELS["mixtral"], **changes}
    refused(lambda: models.family_of(hf).check(hf, MegatronParallel(), EngineParallel()), words)


LLAMA3 = MODELS["llama"]["rope_parameters"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mlp_bias": True}, ["mlp_bias", "got True", "llama is supported only"]),
        ({"attention_bias": True}, ["attention_bias", "got True"]),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 8.0}}, ["rope_parameters.high_freq_factor", "got 8.0", "expected 4.0"]),
        (
            {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}},
            ["original_max_position_embeddings", "expected 8192"],
        ),
        ({"rope_parameters": {**LLAMA3, "factor": None}}, ["factor", "got nothing", "a positive number"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, ["rope_type", "'default' or 'llama3'"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "got 0.5"]),
        ({"num_attention_heads": None, "num_key_value_heads": None}, ["num_attention_heads", "nothing"]),
    ],
)
def test_impossible_for_llama(changes: dict[str, Any], words: list[str]) -> None:
    hf = {**MODELS["llama"], **changes}
    refused(lambda: models.family_of(hf).check(hf, MegatronParallel(), EngineParallel()), words)


def test_llama_without_a_number_of_key_heads_has_as_many_as_heads() -> None:
    hf = {**MODELS["llama"], "num_key_value_heads": None}
    assert models.family_of(hf).tensors(hf)["layers.0.k"] == (48, 48)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_topk_prob": False}, ["norm_topk_prob", "got False", "expected True"]),
        ({"num_experts_per_tok": 1}, ["num_experts_per_tok", "got 1", "several"]),
        ({"n_group": 3}, ["n_group", "got 3", "n_routed_experts = 8"]),
        ({"n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}, ["num_experts_per_tok // topk_group", "got 1", "expected 2"]),
        ({"first_k_dense_replace": 5}, ["first_k_dense_replace", "got 5", "at most num_hidden_layers = 4"]),
        ({"n_shared_experts": -1}, ["n_shared_experts", "got -1"]),
        ({"moe_layer_freq": 2}, ["moe_layer_freq", "got 2"]),
        ({"head_dim": 6}, ["head_dim", "got 6, of which 0.5 rotate", "even"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ["rope_type", "'yarn'"]),
        ({"num_nextn_predict_layers": 1}, ["num_nextn_predict_layers", "got 1", "expected 0", "set it to 0"]),
    ],
)
def test_impossible_for_glm(changes: dict[str, Any], words: list[str]) -> None:
    models.check(config(), MODELS["glm"])
    refused(lambda: models.check(config(), {**MODELS["glm"], **changes}), words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, ["rope_type", "'linear'", "'default' or 'yarn'"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}, ["rope_type", "'dynamic'"]),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": None}}, ["original_max_position_embeddings", "nothing"]),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 9}}, ["factor", "got nothing", "a positive number"]),
        ({"rope_parameters": {**YARN, "mscale": None}}, ["mscale and mscale_all_dim", "'one'", "'both' or 'neither'"]),
        ({"rope_parameters": {**YARN, "attention_factor": 1.1}}, ["attention_factor", "got 1.1"]),
        ({"rope_parameters": {**YARN, "truncate": False}}, ["truncate", "got False"]),
        ({"rope_interleave": False}, ["rope_interleave", "got False"]),
        ({"num_key_value_heads": 4}, ["num_key_value_heads", "got 4", "expected 8"]),
        ({"qk_rope_head_dim": 3}, ["qk_rope_head_dim", "got 3", "even"]),
        ({"kv_lora_rank": None}, ["kv_lora_rank", "nothing"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings"]),
        ({"scoring_func": "softmax"}, ["scoring_func", "'softmax'", "'sigmoid'"]),
        ({"moe_layer_freq": 2}, ["moe_layer_freq", "got 2", "expected 1"]),
        ({"topk_method": None}, ["topk_method", "got None", "'noaux_tc'"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
    ],
)
def test_impossible_for_deepseek(changes: dict[str, Any], words: list[str]) -> None:
    for model in ("deepseek", "moonlight"):
        models.check(config(), MODELS[model])
        models.check(config(), {**MODELS[model], "model_type": "kimi_k2"})
    refused(lambda: models.check(config(), {**MODELS["deepseek"], **changes}), words)


@pytest.mark.parametrize(("model", "train", "word"), [("qwen3_moe", "full", "no selection bias"), ("glm", "lora", "train is lora")])
def test_a_rule_for_biases_that_there_are_not(model: str, train: str, word: str) -> None:
    values = {"run": {"dir": "r", "steps": 1}, "model": {"path": "m"}, "task": {"kind": "arithmetic"}, "trainer": {"router_bias_rate": 0.1}}
    models.check(parse(values), MODELS["glm"])
    hf = {key: value for key, value in MODELS[model].items() if key != "mlp_only_layers"}
    chosen = parse({**values, "train": train, "lora": {"targets": ["q_proj"], "rank": 2}})
    refused(lambda: models.check(chosen, hf), ["trainer.router_bias_rate: got 0.1", "expected 0", word])


def test_layers_that_cannot_have_adapters_are_named() -> None:
    def check(model: str, *targets: str) -> None:
        halves.check(Kind(targets, 2, 4.0), models.family_of(MODELS[model]).shape_of(MODELS[model]))

    check("mixtral", "q_proj", "o_proj", "up_proj")
    check("deepseek", "q_b_proj", "o_proj", "up_proj")
    check("moonlight", "kv_b_proj", "o_proj", "up_proj")
    refused(lambda: check("deepseek", "q_proj", "o_proj"), ["lora.targets: got q_proj", "some of q_a_proj, kv_a_proj_with_mqa, q_b_proj"])
    refused(
        lambda: check("moonlight", "q_proj", "kv_a_proj_with_mqa"), ["got q_proj, kv_a_proj_with_mqa", "some of kv_b_proj, o_proj, gate"]
    )
    refused(lambda: check("glm", "q_b_proj", "k_proj"), ["lora.targets: got q_b_proj", "some of q_proj, k_proj"])


@pytest.mark.parametrize("tied", [False, True])
def test_a_dense_model_may_share_its_embedding(tied: bool) -> None:
    models.check(config({"ranks": 4, "tp": 2, "pp": 2}, {"tp": 8}), {**DENSE, "tie_word_embeddings": tied})


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        (MegatronParallel(pp=2, vpp=3), ["trainer.vpp: got 3", "pipeline stage: 4", "possible: 1, 2, 4"]),
        (MegatronParallel(pp=2, vpp=4, first_layers=2), ["trainer.vpp: got 4", "pipeline stage: 2, 6", "possible: 1, 2"]),
        (MegatronParallel(pp=3, first_layers=3), ["trainer.first_stage_layers: got 3", "num_hidden_layers = 8", "possible: 2, 4, 6"]),
        (MegatronParallel(pp=2, last_layers=8), ["trainer.last_stage_layers: got 8", "trainer.pp = 2", "1, 2, 3, 4, 5, 6, 7"]),
        (MegatronParallel(pp=2, first_layers=3, last_layers=2), ["trainer.first_stage_layers: got 3", "possible: 6"]),
    ],
    ids=str,
)
def test_impossible_stages(grid: MegatronParallel, words: list[str]) -> None:
    hf = {**DENSE, "num_hidden_layers": 8}
    refused(lambda: models.family_of(hf).check(hf, grid, EngineParallel()), words)


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


def test_load_hf_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF))
    assert models.load_hf_config(tmp_path).items() >= HF.items()


@pytest.mark.parametrize("second", [None, "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("first", ["float32", "bfloat16", "float16"])
def test_of_two_dtypes_the_one_that_transformers_takes_is_served(first: str, second: str | None, tmp_path: Path) -> None:
    for given in ({"dtype": first, "torch_dtype": second}, {"torch_dtype": first, "dtype": second}):
        (tmp_path / "config.json").write_text(json.dumps({**HF, **given}))
        wanted = str(AutoConfig.from_pretrained(tmp_path).dtype).removeprefix("torch.")
        hf = models.load_hf_config(tmp_path)
        assert [models.engine_dtype(hf, config(engines=engines).engines) for engines in ({}, {"dtype": "float32"})] == [wanted, "float32"]


@pytest.mark.parametrize(
    ("content", "word"), [(b"{", "valid JSON"), (b"[1]", "a JSON object"), (b"\xff\xfe{", "valid JSON"), (None, "no config.json")]
)
def test_broken_hf_config(tmp_path: Path, content: bytes | None, word: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(DataError, match=word):
        models.load_hf_config(tmp_path)


def test_no_model_directory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such directory"):
        models.load_hf_config(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("engines", "changes", "told"),
    [
        ({"tp": 1}, {"moe_intermediate_size": 48}, "moe_intermediate_size of the model: got 48, expected a multiple of 32 *"),
        ({"tp": 4}, {"moe_intermediate_size": 64}, "32 * engines.tp = 128 on a CPU, where SGLang pads other widths; set engines.tp to 2"),
        ({"tp": 8, "ep": 8}, {"moe_intermediate_size": 256}, "engines.tp: got 8, expected a divisor of the model's num_key_value_heads"),
    ],
)
def test_sizes_that_sglang_pads_on_a_cpu_are_refused_there(engines: dict[str, int], changes: dict[str, int], told: str) -> None:
    """As tried with SGLang 0.5.23: expert_hidden 48 gives w13_weight of [8, 128, 64] for [8, 96, 64], and one key head with tp 2 a
    qkv_proj of [192, 64] for [128, 64]."""
    hf = {**HF, **changes}
    models.check(config(engines=engines), hf)
    with pytest.raises(ConfigError) as refused:
        models.check(config(engines=engines), hf, cpu_engines=True)
    assert told in str(refused.value)


@pytest.mark.parametrize(("tp", "width", "fits"), [(1, 128, True), (1, 96, False), (2, 256, True), (2, 128, False)])
def test_blocks_of_float8_are_padded_whole(tp: int, width: int, fits: bool) -> None:
    hf = {**HF, "moe_intermediate_size": width, "num_key_value_heads": 4}
    shape = models.family_of(hf).shape_of(hf)
    if fits:
        checks.check_cpu_engine(shape, tp, 128)
    else:
        with pytest.raises(ConfigError, match=r"a multiple of 128 \* engines\.tp"):
            checks.check_cpu_engine(shape, tp, 128)
