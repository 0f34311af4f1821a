"""Plans of models: exhaustive over small parallel sizes, and the properties at real sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from plan_steps import carry_out
from reshard_ranks import blank, filled, numbered

from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.reshard import Plan, plan
from benchmarks.published import REAL

SMALL: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 68, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 4, "mlp_only_layers": [1],
}  # fmt: skip
ENGINES = [EngineParallel(1), EngineParallel(2), EngineParallel(2, 2), EngineParallel(4), EngineParallel(4, 2), EngineParallel(4, 4)]


def small_trainers() -> Iterator[MegatronParallel]:
    for tp, pp, ep, etp, dp, te in itertools.product((1, 2), (1, 2), (1, 2, 4), (1, 2), (1, 2, 4), (False, True)):
        if tp * dp % (ep * etp) == 0 and tp * pp * dp <= 8:
            yield MegatronParallel(tp, pp, ep, etp, dp, te)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_every_small_trainer_to_every_small_engine(engine: EngineParallel) -> None:
    family = family_of(SMALL)
    tensors = family.tensors(SMALL)
    values = numbered(tensors)
    engines = family.sglang_layouts(SMALL, engine, "int32", engines=2, first=8)
    expected = [filled(layout, values) for layout in engines]
    wire = 4 * sum(piece.box.size for layout in engines for piece in layout.pieces if piece.tensor in tensors)
    cases = 0
    for trainer in small_trainers():
        ranks = family.megatron_layouts(SMALL, trainer, "int32")
        made = plan(tensors, ranks, engines)
        got = {layout.rank: blank(layout) for layout in engines}
        carry_out(made, {layout.rank: filled(layout, values) for layout in ranks}, got)
        for layout, arrays in zip(engines, expected, strict=True):
            for name, array in arrays.items():
                np.testing.assert_array_equal(got[layout.rank][name], array, err_msg=f"{trainer} {name}")
        assert made.wire_bytes == wire
        cases += 1
    assert cases == 80


def test_layouts_of_all_ranks_are_those_of_each() -> None:
    family, trainer, engine = family_of(SMALL), MegatronParallel(tp=2, pp=2, ep=2, etp=2, dp=4), EngineParallel(4, 2)
    for rank, layout in enumerate(family.megatron_layouts(SMALL, trainer, "int32")):
        alone = family.megatron_layout(SMALL, trainer, rank, "int32")
        assert (layout.rank, dict(layout.storages), tuple(layout.pieces)) == (rank, dict(alone.storages), tuple(alone.pieces))
    layouts = family.sglang_layouts(SMALL, engine, "int32", engines=2, first=16)
    assert [layout.rank for layout in layouts] == list(range(16, 24))
    for i, layout in enumerate(layouts):
        assert tuple(layout.pieces) == tuple(family.sglang_layout(SMALL, engine, i % 4, "int32").pieces)
    assert list(layouts[0].storages)[:3] == [
        "model.embed_tokens.weight", "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.self_attn.o_proj.weight",
    ]  # fmt: skip


# ---------------------------------------------------------------- real sizes

SIZES = [
    ("Qwen3-30B-A3B", MegatronParallel(tp=4, ep=4, etp=2, dp=4), EngineParallel(8, 2), 2),
    ("Qwen3-235B-A22B", MegatronParallel(tp=4, pp=2, ep=32, dp=32, te=True), EngineParallel(8, 8), 16),
    ("DeepSeek-V3", MegatronParallel(tp=8, ep=64, dp=64, te=True), EngineParallel(16, 16), 16),
    ("Moonlight-16B-A3B", MegatronParallel(tp=2, ep=8, dp=8), EngineParallel(4, 4), 4),
    ("GLM-4.5-Air", MegatronParallel(tp=4, ep=16, dp=16), EngineParallel(8, 2), 8),
    ("Mixtral-8x22B", MegatronParallel(tp=4, ep=8, dp=16, te=True), EngineParallel(8), 8),
]


def planned(hf: Mapping[str, Any], trainer: MegatronParallel, engine: EngineParallel, engines: int, rank: int) -> Plan:
    """What a rank does: all layouts, then its own part of the plan, and the digest of the whole."""
    family = family_of(hf)
    layouts = family.sglang_layouts(hf, engine, "bfloat16", engines, first=trainer.world)
    made = plan(family.tensors(hf), family.megatron_layouts(hf, trainer, "bfloat16"), layouts, ranks=[rank])
    assert made.digest
    return made


@pytest.mark.parametrize(("model", "trainer", "engine", "engines"), SIZES, ids=str)
def test_real_sizes(model: str, trainer: MegatronParallel, engine: EngineParallel, engines: int) -> None:
    hf = REAL[model]
    family = family_of(hf)
    family.check(hf, trainer, engine)
    made = planned(hf, trainer, engine, engines, 1)
    one = family.sglang_layouts(hf, engine, "bfloat16")
    needed = [sum(storage.nbytes for storage in layout.storages.values()) for layout in one]
    traffic = made.match.traffic()
    received = dict.fromkeys(range(trainer.world, trainer.world + engines * engine.tp), 0)
    sent = dict.fromkeys(range(trainer.world), 0)
    for source, destination, nbytes in traffic.tolist():
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
        ("Qwen3-30B-A3B", 30.5),
        ("Qwen3-235B-A22B", 235),
        ("DeepSeek-V3", 671),
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
