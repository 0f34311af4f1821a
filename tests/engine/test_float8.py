"""Engines of float8: what arrives from trainers in float32 is, bit for bit, what SGLang's own quantisation makes of the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncmoe.models import load_hf_config
from asyncmoe.models.make import VOCAB, _write_tokenizer
from asyncmoe.trainer.verify import engine_checksums
from tests import float8
from tests.engine.conftest import settings
from tests.engine.oracle import Oracle, perturbed
from tests.engine.test_direct import Checksums, Stage, difference, generate, wrong
from tests.engine.test_families import start

pytestmark = [pytest.mark.engine, pytest.mark.ranks]

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "qwen3_moe": {**SIZES, "num_key_value_heads": 2, "head_dim": 128, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "deepseek_v3": {
        **SIZES, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
        "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip
"""Of which every shard is whole blocks; the last block of DeepSeek's small vectors of keys is not."""


def plain_model(folder: Path, kind: str) -> Path:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MODELS[kind]))
        for name, value in model.named_parameters():
            value.add_((0.2 if "norm" in name else 0.05) * torch.randn_like(value))
        model.save_pretrained(folder)
    _write_tokenizer(folder, 512)
    return folder


class Quantised:
    """A checkpoint as a trainer has it, in float32, and as an engine of float8 should."""

    def __init__(self, plain: Oracle, served: Path, folder: Path) -> None:
        self.path, self._hf = plain.path, load_hf_config(served)
        self.weights = float8.quantised_weights(self._hf, plain.weights)
        self.oracle = Oracle(float8.write_plain(plain.path, folder, float8.dequantised_weights(self.weights)))

    def expected(self, stage: Stage) -> Checksums:
        return engine_checksums(self._hf, stage.rig.config.engines, self.weights)


ENGINES = [pytest.param(*one, marks=pytest.mark.thorough) for one in (("qwen3_moe", 2), *((kind, 1) for kind in MODELS))]


@pytest.mark.parametrize(("kind", "tp"), ENGINES)
def test_an_engine_holds_what_sglang_would_have_quantised(kind: str, tp: int, runner: asyncio.Runner, tmp_path: Path) -> None:
    """Under every layout of the trainer, and by the other path too; and it computes with them what transformers does."""
    first = Oracle(plain_model(tmp_path / "plain", kind))
    float8.write(first.path, tmp_path / "served")
    with started(tmp_path / "served", runner, tmp_path, tp, first) as stage:
        kept = [Quantised(one, tmp_path / "served", tmp_path / f"back-{n}") for n, one in enumerate(stage.checkpoints)]
        assert wrong(stage.loaded, kept[0].expected(stage)) == [[]] * tp
        assert difference(runner.run(generate(stage)), kept[0].oracle) < 1e-5
        _, a, b = stage.checkpoints
        for ranks, layouts in ((1, {"tp=1": [(a, 1), (b, 2)]}), (2, {"tp=2": [(a, 3)], "pp=2": [(b, 4)], "ep=2": [(a, 5)]})):
            found = runner.run(stage.publish(ranks, layouts))
            assert not found.failed, found.failed
            assert [outcome["error"] for outcome in found.outcomes[0]] == [None] * sum(map(len, layouts.values()))
            for several in layouts.values():
                for oracle, version in several:
                    assert wrong(found.arrived[version], kept[stage.checkpoints.index(oracle)].expected(stage)) == [[]] * tp
        assert difference(runner.run(generate(stage)), kept[1].oracle) < 1e-5
        runner.run(stage.rig.sender.publish(6, kept[2].weights, kept[2].expected(stage), buckets=1))
        assert difference(runner.run(generate(stage)), kept[2].oracle) < 1e-5


@contextmanager
def started(served: Path, runner: asyncio.Runner, folder: Path, tp: int, first: Oracle) -> Iterator[Stage]:
    """One engine."""
    rig = start(runner, settings(served, folder / "run", max_total_tokens=4096, tp=tp))
    try:
        checkpoints = [first, perturbed(first, folder / "a", 1), perturbed(first, folder / "b", 2)]
        yield Stage(rig, checkpoints, folder, runner.run(rig.engine.client.checksums(30.0)))
    finally:
        runner.run(rig.engine.stop())
