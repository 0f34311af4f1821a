"""Memory of a GPU: closed forms for a real model, worked out by hand, and laws over all small sizes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from test_models_plan import SMALL, small_trainers

from asyncmoe.config import Config
from asyncmoe.config.lora import GROUPED, MLP
from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.models.lora.adapter import Kind, halves
from asyncmoe.plan import activations, budget, memory, traffic
from asyncmoe.plan.activations import Microbatch
from asyncmoe.plan.memory import EngineMemory, Training
from benchmarks.published import REAL
from tests.configs import minimal

HF = REAL["Qwen3-30B-A3B"]
L, H, V, Q, KV, D, E, K, F = 48, 2048, 151936, 4096, 512, 128, 128, 8, 768
EXPERT = 3 * H * F
DIVIDED = H * (Q + 2 * KV) + Q * H
"""Of a layer's attention, over tensor-parallel ranks."""
COPIED = 2 * H + 2 * D + E * H
"""Norms and router of a layer."""
ALL = 2 * V * H + L * (DIVIDED + COPIED + E * EXPERT) + H
NODE = MegatronParallel(tp=4, ep=8, dp=2)
PASS = Microbatch(8192, recompute=True)
KIND = Kind(GROUPED + MLP, 32, 32.0)
SHARED = replace(KIND, experts="shared_outer")


def of(parallel: MegatronParallel, training: Training, stage: int = 0) -> dict[str, int]:
    return dict(memory.trainer(HF, parallel, training)[stage].parts)


# ---------------------------------------------------------------- the trainer


def test_all_weights_of_a_real_model_on_one_node() -> None:
    assert ALL == 30_532_122_624  # as published, 30.5 B
    assert memory.whole(HF) == memory.RankParameters(ALL - L * E * EXPERT, L * E * EXPERT)
    dense = 2 * V * H // 4 + L * (DIVIDED // 4 + COPIED) + H
    experts = L * 16 * EXPERT
    assert of(NODE, Training(PASS)) == {
        "weights": 2 * (dense + experts),
        "gradients": 4 * (dense + experts),
        "optimizer": 12 * (dense // 2 + experts),
        "activations": L * 2 * H * 8192 // 4,
        "working set": activations.working(family_of(HF).shape_of(HF), NODE, 0, PASS),
        "weight sync": 2 * (256 << 20),
    }
    assert of(NODE, Training(PASS, distributed=False))["optimizer"] == 12 * (dense + experts)
    float32 = of(NODE, Training(replace(PASS, dtype="float32"), bucket_bytes=1 << 20))
    assert (float32["weights"], float32["gradients"]) == (4 * (dense + experts), 4 * (dense + experts))
    assert float32["optimizer"] == 8 * (dense // 2 + experts)
    assert float32["weight sync"] == 2 << 20


def test_a_reference_policy_is_a_second_copy_of_the_weights_but_not_under_adapters() -> None:
    plain = of(NODE, Training(PASS))
    found = of(NODE, Training(PASS, reference=True))
    assert found["reference"] + found["activations"] == plain["weights"], "its passes keep no activations"
    assert "reference" not in of(NODE, Training(replace(PASS, adapter=KIND), reference=True))


@pytest.mark.parametrize(
    ("sizes", "engine"),
    [
        (NODE, EngineParallel(4, 4)),
        (MegatronParallel(tp=4, pp=2, ep=4, dp=2), EngineParallel(2, 1)),
        (MegatronParallel(dp=4), EngineParallel(2, 1)),
    ],
)
def test_the_base_of_deltas_is_what_a_rank_sends_by_the_real_plan(sizes: MegatronParallel, engine: EngineParallel) -> None:
    """Ranks with the same weights share the work; an engine's TP ranks all get norms and routers, which the plan counts each time."""
    sent = traffic.foresee(HF, sizes, engine, 1).sent
    bases = [stage.parts["delta base"] for stage in memory.trainer(HF, sizes, Training(PASS, bucket_bytes=0, delta_base=True))]
    assert max(bases) == pytest.approx(sent, rel=0.01)


@pytest.mark.parametrize("kind", [KIND, SHARED], ids=["per_expert", "shared_outer"])
def test_all_ranks_together_hold_an_adapter_as_often_as_there_are_replicas(kind: Kind) -> None:
    m = family_of(HF).shape_of(HF)
    parallel = MegatronParallel(pp=2, ep=8, dp=16)
    sizes = {name: math.prod(shape) for name, shape in halves(m, kind).items()}
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name and ".shared." not in name)
    held = [memory.adapters_of(m, kind, parallel, rank, "bfloat16") for rank in range(parallel.world)]
    assert sum(one.experts for one in held) == of_experts * 2
    assert sum(one.dense for one in held) == (sum(sizes.values()) - of_experts) * 16
    assert sum(one.nbytes for one in held) == 2 * sum(one.all for one in held)


TIED = {**{key: value for key, value in SMALL.items() if "experts" not in key}, "model_type": "qwen3", "tie_word_embeddings": True}


@pytest.mark.parametrize("hf", [SMALL, TIED], ids=["experts", "dense, tied"])
def test_all_ranks_together_hold_the_model_as_often_as_there_are_replicas(hf: dict[str, Any]) -> None:
    tensors = {name: math.prod(shape) for name, shape in family_of(hf).tensors(hf).items()}
    seen = 0
    for parallel in small_trainers():
        if hf is TIED and parallel.ep * parallel.etp > 1:
            continue
        tp, dp, world = parallel.tp, parallel.dp, parallel.tp * parallel.dp
        experts = copied = divided = 0
        for name, size in tensors.items():
            if ".experts." in name:
                experts += size
            elif "norm" in name or "router" in name:
                copied += size
            else:
                divided += size
        if hf is TIED and parallel.pp > 1:
            divided += tensors["embed"]  # the last stage's output layer
        held = [memory.weights_of(hf, parallel, rank, "bfloat16") for rank in range(parallel.world)]
        replicas = world // (parallel.ep * parallel.etp)
        assert sum(one.all for one in held) == divided * dp + copied * tp * dp + experts * replicas
        assert all(one.nbytes == 2 * one.all for one in held)
        if parallel.ep > 1:
            assert sum(one.experts for one in held) == experts * memory.expert_data_parallel(parallel)
        # Moments and masters of what is not copied are there once, were it not for tensor-parallel copies, and etp where ep is 1.
        if parallel.ep > 1 or parallel.etp == tp:
            shared_out = sum(memory.optimizer_bytes(one, parallel, Training(PASS)) for one in held)
            once = 12 * (divided + copied * tp + experts)
            assert once <= shared_out <= once + 12 * 2 * parallel.world
        seen += 1
    assert seen == (80 if hf is SMALL else 22)


# ---------------------------------------------------------------- activations


def test_stages_keep_micro_batches_as_the_published_schedules_do() -> None:
    """The first of p stages p of them; with m chunks p (1 + (p - 1) / (p m)) (arXiv 2205.05198, section 4.2.3); the last stage one."""
    m = family_of(HF).shape_of(HF)
    one = activations.kept(m, MegatronParallel(), 0, PASS)
    assert one == L * 2 * H * 8192
    for p in (2, 4):
        stages = [activations.kept(m, MegatronParallel(pp=p), stage, PASS) for stage in range(p)]
        assert stages == [one // p * (p - stage) for stage in range(p)]
    for p, chunks in ((2, 2), (4, 3), (4, 12)):
        first = activations.kept(m, MegatronParallel(pp=p, vpp=chunks), 0, PASS)
        assert first == pytest.approx(one * (1 + (p - 1) / (p * chunks)))


# ---------------------------------------------------------------- engines


def test_an_engine_of_a_real_model() -> None:
    dense = 2 * V * H // 4 + L * ((Q + 2 * KV) * H // 4 + Q * H // 4 + COPIED) + H
    weights = 2 * (dense + L * 32 * EXPERT)
    found = memory.engine(HF, EngineParallel(4, 4), EngineMemory(1_000_000))
    mib = 512 + 1.5 * 8192 + 4 / 8 * 1024 + 2 * 256
    assert dict(found.parts) == {
        "weights": weights,
        "staging": weights,
        "KV cache": 1_000_000 * L * 2 * 1 * D * 2,
        "working set": int(mib * (1 << 20)),
        "weight sync": 2 * (256 << 20),
    }
    bare = memory.engine(HF, EngineParallel(4, 4), EngineMemory(1_000_000, staged=False, gpu=False)).parts
    assert bare.keys() == {"weights", "KV cache", "weight sync"}


@pytest.mark.parametrize(("experts", "billions"), [("per_expert", 3.38), ("shared_outer", 0.98)])
def test_adapters_of_an_engine_are_in_two_slots_and_a_third_place(experts: str, billions: float) -> None:
    """Sizes at rank 32 as published for this model."""
    kind = KIND if experts == "per_expert" else SHARED
    found = memory.engine(HF, EngineParallel(), EngineMemory(0, adapter=kind)).parts
    assert found["adapters"] == pytest.approx(2 * billions * 1e9, rel=0.01)
    assert found["adapters"] == 2 * found["staging"]
    assert "staging" not in memory.engine(HF, EngineParallel(), EngineMemory(0, adapter=kind, staged=False)).parts


def test_the_kv_cache_gets_what_is_left() -> None:
    parallel, serving = EngineParallel(4, 4), EngineMemory(5)
    tokens = memory.kv_room(HF, parallel, serving, 80.0)
    assert memory.engine(HF, parallel, replace(serving, tokens=tokens)).fits(80.0)
    assert not memory.engine(HF, parallel, replace(serving, tokens=tokens + 1)).fits(80.0)
    assert memory.kv_room(HF, EngineParallel(), serving, 80.0) == 0  # twice 61 GB


# ---------------------------------------------------------------- of a configuration


def config(**sections: Any) -> Config:
    return minimal(**{"cluster": {"network": "hostname"}} | sections)


ONE = 8 * (16 << 20)
"""Bytes of a communicator, by `asyncmoe.reshard.nccl.CTA_BYTES`."""


def test_a_configuration_is_read_as_the_trainer_and_the_engines_read_it() -> None:
    plain = config()
    assert budget.training(plain, HF) == Training(Microbatch(4096, recompute=False), distributed=False, communicators=ONE)
    assert budget.training(plain, HF, cpu=True).microbatch.dtype == "float32"
    rich = config(
        train="lora",
        lora={"rank": 8, "experts": "shared_outer"},
        trainer={"tokens_per_microbatch": 512, "recompute": "full", "dtype": "float32", "optimizer": {"distributed": True}},
        environment={"max_tokens": 2000},
        rollout={"top_k": 20},
        objective={"kl": {"coefficient": 0.1}},
        sync={"bucket_bytes": 1000},
        engines={"max_running": 3, "dtype": "float32", "args": ["--chunked-prefill-size", "64", "--chunked-prefill-size=2048"]},
    )
    kind = Kind(GROUPED + MLP, 8, 32.0, "shared_outer")
    assert budget.training(rich, HF) == Training(Microbatch(2000, True, "float32", kind, support=20), True, True, 1000, ONE)
    assert budget.serving(rich, HF) == EngineMemory(6000, True, 2048, 3, "float32", kind, 1000, routes=True, communicators=ONE)
    assert budget.serving(plain, {**HF, "max_position_embeddings": 100}).tokens == 1600
    assert budget.serving(config(engines={"max_total_tokens": 7777}), HF).tokens == 7777
    assert not budget.stages(config(sync={"method": "broadcast"}), HF, 1e6)


def test_the_output_layer_is_the_last_stages_and_has_a_block_of_logits() -> None:
    """8192 rows and 2^26 logits: 8192 ids in a block. Two copies of it, in bfloat16 and in float32, one more for the entropy."""
    m = family_of(HF).shape_of(HF)
    kept, block, gradient = 8192 * (2 * H + 12), 6 << 26, 4 * 8192 * H + 2 * 8192 * H
    small = replace(PASS, recompute=False)
    parallel = MegatronParallel(tp=4, pp=2, ep=8, dp=2)
    assert activations.head(m, parallel, small) == kept + max(block + (4 << 26), block + gradient)
    assert activations.head(m, parallel, small, entropy=False) == kept + block + gradient
    assert activations.head(m, parallel, replace(small, support=20)) == activations.head(m, parallel, small) + 8192 * (12 * 20 + 1)
    layer = activations.working(m, parallel, 0, small)
    assert activations.working(m, parallel, 1, small) == max(layer, activations.head(m, parallel, small))
    again = activations.working(m, parallel, 0, PASS)
    assert again - layer == activations.layer(m, parallel, small, dense=False)


def test_key_heads_are_divided_until_each_rank_has_one() -> None:
    assert [memory.kv_bytes(HF, EngineParallel(tp), "bfloat16") for tp in (1, 2, 4, 8)] == [L * 2 * n * D * 2 for n in (4, 2, 1, 1)]
    assert memory.kv_bytes(HF, EngineParallel(4), "float32") == L * 2 * 1 * D * 4


def test_communicators_are_counted_where_nccl_carries_weights() -> None:
    """16 MiB for each of at most 8 CTAs, however many engines there are."""
    sixteen = budget.training(config(engines={"count": 16}), HF).communicators
    assert sixteen == ONE
    assert budget.serving(config(engines={"count": 16}), HF).communicators == ONE
    assert budget.training(config(engines={"count": 16}), HF, cpu=True).communicators == 0
    for together in ({"sync": {"transport": "ipc"}}, {"cluster": {"network": "loopback"}}):
        assert budget.training(config(engines={"count": 16}, **together), HF).communicators == 0
    plain = memory.trainer(HF, NODE, Training(PASS))[0].parts["weight sync"]
    assert memory.trainer(HF, NODE, Training(PASS, communicators=sixteen))[0].parts["weight sync"] == plain + sixteen
