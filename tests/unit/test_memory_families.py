"""Memory of a GPU for models of other families: closed forms for DeepSeek-V3 and GLM-4.5, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from model_cases import MODELS

from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.models.shape import Shape
from asyncmoe.plan import activations, memory
from asyncmoe.plan.activations import Microbatch
from asyncmoe.plan.memory import EngineMemory, RankParameters, Training
from benchmarks.published import REAL

DEEPSEEK, GLM, AIR, MOONLIGHT = (REAL[name] for name in ("DeepSeek-V3", "GLM-4.5", "GLM-4.5-Air", "Moonlight-16B-A3B"))
PASS = Microbatch(8192, recompute=True)
ALONE = Microbatch(1000, recompute=False)
families = pytest.mark.parametrize("hf", MODELS.values(), ids=MODELS)


def shape(hf: dict[str, Any]) -> Shape:
    return family_of(hf).shape_of(hf)


# ---------------------------------------------------------------- parameters


def test_deepseek_v3_on_a_trainers_rank() -> None:
    """Small vectors' layers are whole on every rank; a router's bias has neither gradient nor moments, and is float32."""
    down = 7168 * 1536 + 7168 * (512 + 64)
    up = 128 * 192 * 1536 + 128 * 256 * 512 + 7168 * 128 * 128
    norms = 2 * 7168 + 1536 + 512
    expert = shared = 3 * 7168 * 2048
    router, dense, table = 256 * 7168, 3 * 7168 * 18432, 129280 * 7168
    experts = 58 * 256 * expert
    others = 61 * (down + up + norms) + 3 * dense + 58 * (router + shared) + 2 * table + 7168
    assert others + experts == 671_026_404_352
    assert memory.whole(DEEPSEEK) == RankParameters(others, experts)
    parallel = MegatronParallel(tp=8, ep=64, dp=16)
    mine = 61 * (down + up // 8 + norms) + 3 * dense // 8 + 58 * (router + shared // 8) + 2 * table // 8 + 7168
    of_experts = 58 * 4 * expert
    held = memory.weights_of(DEEPSEEK, parallel, 0, "bfloat16")
    biases = 58 * 256 * 4
    sent = round((2 * mine + biases) / 16 + 2 * of_experts / 2)
    assert held == RankParameters(mine, of_experts, 2 * (mine + of_experts) + biases, sent=sent)
    parts = memory.trainer(DEEPSEEK, parallel, Training(PASS))[0].parts
    assert parts["gradients"] == 4 * (mine + of_experts)
    assert parts["optimizer"] == 12 * (-(-mine // 16) + of_experts // 2)
    assert parts["activations"] == 61 * 2 * 7168 * 8192 // 8
    assert parts["weight sync"] == 2 * (256 << 20)


@families
def test_a_rank_alone_holds_the_model(hf: dict[str, Any]) -> None:
    held, whole = memory.weights_of(hf, MegatronParallel(), 0, "float32"), memory.whole(hf)
    assert held.all == whole.all
    biases = 4 * sum(size[0] for name, size in family_of(hf).tensors(hf).items() if name.endswith("router_bias"))
    assert held.nbytes == 4 * whole.all + biases


# ---------------------------------------------------------------- activations


def test_what_latent_attention_keeps() -> None:
    m = shape(DEEPSEEK)
    attention = 21_504 + 4_608 + 1_600 + 98_304  # norm; small vectors of queries, of keys and values; 128 heads of 2 * 192 + 3 * 128
    experts = 21_504 + 10_240 + 155_648  # norm; the shared expert; 8 * (7168 + 6 * 2048)
    router = 2_464  # bytes: 9 * 256 + 20 * 8
    layer = activations.layer(m, MegatronParallel(), ALONE, dense=False)
    assert layer == 1000 * (2 * (attention + 256 + experts) + router)
    first = activations.layer(m, MegatronParallel(), ALONE, dense=True)
    assert first == 1000 * 2 * (attention + 256 + 21_504 + 92_160)
    eighth = activations.layer(m, MegatronParallel(tp=8), ALONE, dense=False)
    assert eighth == 125 * (2 * (attention + 8 * 256 + experts) + router)
    assert activations.kept(m, MegatronParallel(), 0, ALONE) == 3 * first + 58 * layer
    straight = activations.layer(shape(MOONLIGHT), MegatronParallel(), ALONE, dense=True)
    assert straight == 1000 * 2 * (6_144 + 1_600 + 12_288 + 256 + 6_144 + 56_320)


# ---------------------------------------------------------------- engines


def test_a_token_in_a_cache_of_small_vectors() -> None:
    """Which are not divided over tensor-parallel ranks: 61 layers of 512 + 64."""
    for parallel in (EngineParallel(), EngineParallel(8, 8), EngineParallel(16, 16)):
        assert memory.kv_bytes(DEEPSEEK, parallel, "bfloat16") == 70_272
    assert memory.kv_bytes(GLM, EngineParallel(), "bfloat16") == 376_832
    assert memory.kv_bytes(GLM, EngineParallel(8, 8), "bfloat16") == 47_104


def test_an_engine_keeps_the_layer_that_leads_up_twice() -> None:
    found = memory.engine(DEEPSEEK, EngineParallel(16, 16), EngineMemory(1000)).parts
    assert found["derived"] == 61 * 2 * 128 * 256 * 512 // 16
    assert found["KV cache"] == 70_272_000
    assert found["staging"] == found["weights"]
    assert "derived" not in memory.engine(GLM, EngineParallel(8, 8), EngineMemory(1000)).parts


# ---------------------------------------------------------------- splits
