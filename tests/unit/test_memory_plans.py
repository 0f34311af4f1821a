"""What settings save of a trainer GPU's memory: context parallelism, and the section `trainer.memory`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncmoe.config import Config, parse
from asyncmoe.errors import ConfigError
from asyncmoe.models import MegatronParallel, family_of
from asyncmoe.plan import activations, budget
from asyncmoe.plan.activations import Microbatch
from benchmarks.published import REAL

HF = REAL["Qwen3-30B-A3B"]
BASE: dict[str, Any] = {"run": {"dir": "r", "steps": 1}, "model": {"path": "m"}, "task": {"kind": "arithmetic"}}

# ---------------------------------------------------------------- context parallelism


def test_context_parallel_ranks_share_rows_and_optimizer_and_hold_all_keys_and_values() -> None:
    """Of 65536 rows each of 4 ranks has a quarter; weights and gradients stay whole, the optimizer's state is shared among dp * cp."""
    values = {"ranks": 16, "tp": 4, "ep": 8, "dtype": "bfloat16", "tokens_per_microbatch": 65536, "recompute": "full"}
    whole, divided = (parse({**BASE, "trainer": {**values, "cp": cp}}) for cp in (1, 4))
    one, four = (budget.of_run(config, HF).trainer.parts for config in (whole, divided))
    for name in ("weights", "gradients", "optimizer"):
        assert four[name] == one[name]
    assert 4 * four["activations"] == one["activations"] == 48 * 2 * 2048 * 65536 // 4
    m, parallel = family_of(HF).shape_of(HF), MegatronParallel(tp=4, pp=2, ep=8, dp=4)  # whose first stage has no logits
    share, alone = (Microbatch(16384, True, cp=cp) for cp in (4, 1))
    gathered = 65536 * 2 * (4 // 4) * 128 * 2  # keys and values of one head a rank, 2 bytes each
    assert activations.working(m, parallel, 0, share) == activations.working(m, parallel, 0, alone) + gathered


# ---------------------------------------------------------------- trainer.memory

SHARE = {"ranks": 8, "tp": 4, "ep": 8, "recompute": "full", "tokens_per_microbatch": 8192}


def trainer(**keys: Any) -> Config:
    return parse({**BASE, "trainer": {**SHARE, **keys}})


def test_the_offloaded_share_of_the_optimizer_is_on_the_host_with_its_gradients() -> None:
    """Float32 weights and two averages: 12 bytes a parameter, of which a rank has 2.6 billion dense ones / dp, and 16 experts a layer."""
    plain, half, whole = (budget.of_run(trainer(memory={"optimizer_offload": share}), HF) for share in (0, 0.5, 1))
    dense, experts = plain.trainer.parts["optimizer"] // 12, 48 * 16 * 3 * 2048 * 768
    assert dense > experts
    assert "optimizer" not in whole.trainer.parts
    assert whole.host == {"trainer.memory.optimizer_offload": 16 * dense}
    assert (half.trainer.parts["optimizer"], *half.host.values()) == (12 * (dense - dense // 2), 16 * (dense // 2))
    assert plain.host == {}
    others = {name: nbytes for name, nbytes in plain.trainer.parts.items() if name != "optimizer"}
    assert dict(whole.trainer.parts) == others


def test_float8_keeps_both_copies_of_the_matrices_but_of_the_layers_at_the_ends() -> None:
    plain, found = (budget.of_run(trainer(precision=precision), HF).trainer.parts for precision in (None, "fp8"))
    layer = (2048 * (4096 + 2 * 512) + 4096 * 2048) // 4 + 16 * 3 * 2048 * 768
    assert found["float8 weights"] == 2 * (46 * layer + 46 * layer // 4096)
    assert {name: nbytes for name, nbytes in found.items() if name != "float8 weights"} == dict(plain), "weights stay bfloat16"
    every = budget.of_run(trainer(precision="fp8", edge_layers=0), HF).trainer.parts["float8 weights"]
    assert every == 2 * (48 * layer + 48 * layer // 4096)


@pytest.mark.parametrize(
    ("modules", "dense"),
    [("core_attn", False), ("layernorm", False), ("moe", False), ("moe_act", False), ("shared_experts", False), ("mlp", True)],
)
def test_what_is_recomputed_is_not_kept_and_comes_back_one_layer_at_a_time(modules: str, dense: bool) -> None:
    """tests/ranks/test_memory.py compares what is kept with what Megatron's layers keep."""
    hf = REAL["DeepSeek-V3"]
    m, parallel, rows = family_of(hf).shape_of(hf), MegatronParallel(tp=4, pp=2, ep=8, dp=8, first_layers=30, last_layers=31), 4096
    plain, again = Microbatch(rows, False), Microbatch(rows, False, modules=(modules,))
    saved = activations.recomputed(m, parallel, again, dense)
    width = {
        "core_attn": 128 * 128 // 4,
        "layernorm": 4 * 7168 // 4,
        "mlp": 5 * 18432 // 4,
        "moe_act": 8 * 1.5 * 4 * 2048 // 4,
        "shared_experts": 5 * 2048 // 4,
    }
    if modules == "moe":
        parts = activations.recomputed(m, parallel, replace(again, modules=("moe_act", "shared_experts")), dense)
        assert saved > parts
    else:
        assert saved == 2 * rows * width[modules]
    layers = (3 if dense else 27) if modules in ("mlp", "moe", "moe_act", "shared_experts") else 30
    assert activations.kept(m, parallel, 0, plain) - activations.kept(m, parallel, 0, again) == 2 * layers * saved
    assert activations._layer_backward(m, parallel, again, dense) == activations._layer_backward(m, parallel, plain, dense) + saved


def test_an_offload_that_the_host_has_no_memory_for_is_refused_with_what_fits() -> None:
    config = trainer(memory={"optimizer_offload": 1})
    found = budget.of_run(config, HF)
    budget.check_host(config, found, 1 << 40)
    with pytest.raises(ConfigError, match=r"trainer.memory.optimizer_offload: got 1, with which 8 trainer ranks take 489 GB") as caught:
        budget.check_host(config, found, 300_000_000_000)
    assert "expected at most 270 GB, as 10% of 300 are left free; take 0." in str(caught.value)
    share = float(str(caught.value).partition("left free; take ")[2].partition(",")[0])
    less = trainer(memory={"optimizer_offload": share})
    budget.check_host(less, budget.of_run(less, HF), 300_000_000_000)


def test_averages_in_bfloat16_take_half_but_for_copies_in_the_step() -> None:
    plain, both, one = (
        budget.of_run(trainer(memory=memory), HF).trainer.parts
        for memory in ({}, {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}, {"exp_avg_dtype": "bfloat16"})
    )
    parameters = plain["optimizer"] // 12
    assert (both["optimizer"], one["optimizer"]) == (8 * parameters, 10 * parameters)
    experts = 48 * 16 * 3 * 2048 * 768
    assert both["working set"] + both["activations"] == 4 * 2 * experts, "Transformer Engine's Adam copies both of all experts"
