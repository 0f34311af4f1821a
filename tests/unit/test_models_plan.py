"""Layouts of all ranks, and plans of models at real sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.models.payload import Payload
from asyncmoe.reshard import Plan, plan
from benchmarks.published import REAL

SMALL: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 68, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 4, "mlp_only_layers": [1],
}  # fmt: skip


def small_trainers() -> Iterator[MegatronParallel]:
    for tp, pp, ep, etp, dp, te in itertools.product((1, 2), (1, 2), (1, 2, 4), (1, 2), (1, 2, 4), (False, True)):
        if tp * dp % (ep * etp) == 0 and tp * pp * dp <= 8:
            yield MegatronParallel(tp, pp, ep, etp, dp, te)


def test_layouts_of_all_ranks_are_those_of_each() -> None:
    payload, trainer, engine = Payload(SMALL), MegatronParallel(tp=2, pp=2, ep=2, etp=2, dp=4), EngineParallel(4, 2)
    for rank, layout in enumerate(payload.trainer(trainer, "int32")):
        alone = payload.weights_of_trainer(trainer, rank, "int32")
        assert (layout.rank, dict(layout.storages), tuple(layout.pieces)) == (rank, dict(alone.storages), tuple(alone.pieces))
    layouts = payload.engines(engine, "int32", 2, first=16)
    assert [layout.rank for layout in layouts] == list(range(16, 24))
    for i, layout in enumerate(layouts):
        assert tuple(layout.pieces) == tuple(payload.weights_of_engine(engine, i % 4, "int32").pieces)
    assert list(layouts[0].storages)[:3] == [
        "model.embed_tokens.weight", "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.self_attn.o_proj.weight",
    ]  # fmt: skip


SIZES = [
    ("Qwen3-30B-A3B", MegatronParallel(tp=4, ep=4, etp=2, dp=4), EngineParallel(8, 2), 2),
    ("Qwen3-235B-A22B", MegatronParallel(tp=4, pp=2, ep=32, dp=32, te=True), EngineParallel(8, 8), 16),
    ("DeepSeek-V3", MegatronParallel(tp=8, ep=64, dp=64, te=True), EngineParallel(16, 16), 16),
    ("GLM-4.5-Air", MegatronParallel(tp=4, ep=16, dp=16), EngineParallel(8, 2), 8),
    ("Mixtral-8x22B", MegatronParallel(tp=4, ep=8, dp=16, te=True), EngineParallel(8), 8),
]


def planned(hf: Mapping[str, Any], trainer: MegatronParallel, engine: EngineParallel, engines: int, rank: int) -> Plan:
    """What a rank does: all layouts, then its own part of the plan, and the digest of the whole."""
    payload = Payload(hf)
    layouts = payload.engines(engine, "bfloat16", engines, first=trainer.world)
    return plan(payload.tensors(), payload.trainer(trainer, "bfloat16"), layouts, ranks=[rank])


@pytest.mark.parametrize(("model", "trainer", "engine", "engines"), SIZES, ids=str)
def test_real_sizes(model: str, trainer: MegatronParallel, engine: EngineParallel, engines: int) -> None:
    hf = REAL[model]
    family_of(hf).check(hf, trainer, engine)
    made = planned(hf, trainer, engine, engines, 1)
    one = Payload(hf).engines(engine, "bfloat16")
    needed = [sum(storage.nbytes for storage in layout.storages.values()) for layout in one]
    received = dict.fromkeys(range(trainer.world, trainer.world + engines * engine.tp), 0)
    sent = dict.fromkeys(range(trainer.world), 0)
    for source, destination, nbytes in made.match.traffic().tolist():
        sent[source] += nbytes
        received[destination] += nbytes
    assert list(received.values()) == needed * engines  # nothing but its own bytes, each once (these vocabularies need no padding)
    assert max(sent.values()) <= 1.05 * sum(sent.values()) / len(sent)
    other = planned(hf, trainer, engine, engines, trainer.world + engine.tp - 1)
    assert made.digest == other.digest
    assert dict(other.destinations[trainer.world + engine.tp - 1]) == dict(one[engine.tp - 1].storages)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("Qwen3-235B-A22B", 235),
        ("Kimi-K2", 1000),
        ("Moonlight-16B-A3B", 16),
        ("GLM-4.5", 355),
        ("GLM-4.5-Air", 106),
        ("Mixtral-8x22B", 141),
    ],
)
def test_real_models_have_as_many_weights_as_published(model: str, billions: float) -> None:
    """Which is rounded, and with the layers of multi-token prediction."""
    count = sum(math.prod(shape) for shape in family_of(REAL[model]).tensors(REAL[model]).values())
    assert count / 1e9 == pytest.approx(billions, rel=0.03)
