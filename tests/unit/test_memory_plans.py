"""Savings of settings in a trainer GPU's memory, their cost in host memory, devices used in turn, and models of other families.

tests/ranks/test_memory.py compares what is kept with what Megatron's layers keep, test_async_save.py copies with real ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import MODELS
from test_models_plan import SMALL

from asyncmoe import models
from asyncmoe.config import Config
from asyncmoe.errors import ConfigError
from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.occupancy import DeviceTurn
from asyncmoe.plan import activations, budget, memory, switch
from asyncmoe.plan.activations import Microbatch
from asyncmoe.plan.budget import PLACEMENT, Budget
from asyncmoe.plan.memory import ASLEEP, EngineMemory, GpuMemory, RankParameters, Training
from asyncmoe.plan.phases import SLEEPS, moved, phases
from asyncmoe.plan.traffic import Forecast
from benchmarks.published import REAL
from tests.configs import demo, minimal
from tests.unit.example_counts import examples

HF, DEEPSEEK, GLM = REAL["Qwen3-30B-A3B"], REAL["DeepSeek-V3"], REAL["GLM-4.5"]
SPARSE: dict[str, Any] = {**SMALL, "mlp_only_layers": []}

# ---------------------------------------------------------------- context parallelism


def test_context_parallel_ranks_share_rows_and_optimizer_and_hold_all_keys_and_values() -> None:
    """Of 65536 rows each of 4 ranks has a quarter; weights and gradients stay whole, the optimizer's state is shared among dp * cp."""
    values = {"ranks": 16, "tp": 4, "ep": 8, "dtype": "bfloat16", "tokens_per_microbatch": 65536, "recompute": "full"}
    whole, divided = (minimal(trainer={**values, "cp": cp}) for cp in (1, 4))
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
    return minimal(trainer={**SHARE, **keys})


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


def test_an_offload_that_the_host_has_no_memory_for_is_refused_with_what_fits() -> None:
    config = trainer(memory={"optimizer_offload": 1})
    found = budget.of_run(config, HF)
    budget.check_host(config, found, 1 << 40)
    with pytest.raises(ConfigError, match=r"trainer.memory.optimizer_offload: got 1, with which .* 489 GB") as caught:
        budget.check_host(config, found, 300_000_000_000)
    assert "expected at most 270 GB, as 10% of 300 GB are left free; set 0." in str(caught.value)
    share = float(str(caught.value).partition("left free; set ")[2].partition(",")[0])
    less = trainer(memory={"optimizer_offload": share})
    budget.check_host(less, budget.of_run(less, HF), 300_000_000_000)


def test_engines_pin_the_routes_of_all_tokens_of_their_cache_once_a_rank() -> None:
    """48 layers of 8 experts, 4 bytes each: 1.84 GB for 1.2 million tokens, of which two engines of 4 ranks have 15 GB."""
    sizes = {"count": 2, "tp": 4, "max_total_tokens": 1_200_000}
    config = minimal(trainer={**SHARE, "memory": {"optimizer_offload": 1}}, engines=sizes)
    found = budget.of_run(config, HF)
    assert found.engine.host == {"keep.routing": 1_843_200_000}
    assert budget.of_run(minimal(engines=sizes, keep={"routing": "off"}), HF).engine.host == {}
    trainers = 8 * found.host["trainer.memory.optimizer_offload"]
    budget.check_host(config, found, round((trainers + 14.8e9) / 0.9))
    with pytest.raises(ConfigError):
        budget.check_host(config, found, round((trainers + 14.7e9) / 0.9))
    elsewhere = minimal(trainer=config.trainer, engines={**sizes, "join": True})
    budget.check_host(elsewhere, found, round(trainers / 0.9) + 1)


def test_averages_in_bfloat16_take_half_but_for_copies_in_the_step() -> None:
    plain, both, one = (
        budget.of_run(trainer(memory=saved), HF).trainer.parts
        for saved in ({}, {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}, {"exp_avg_dtype": "bfloat16"})
    )
    parameters = plain["optimizer"] // 12
    assert (both["optimizer"], one["optimizer"]) == (8 * parameters, 10 * parameters)
    experts = 48 * 16 * 3 * 2048 * 768
    assert both["working set"] + both["activations"] == 4 * 2 * experts, "Transformer Engine's Adam copies both of all experts"


# ---------------------------------------------------------------- devices in turn

GENERATING, TRAINING, WAKING = DeviceTurn.GENERATING, DeviceTurn.TRAINING, DeviceTurn.WAKING
MESSAGES = 2 * (256 << 20)
NODE = {"ranks": 8, "tp": 4, "ep": 8, "tokens_per_microbatch": 8192, "recompute": "full", "dtype": "bfloat16"}


def in_turn(**sections: Any) -> Config:
    given = {"trainer": NODE, "engines": {"count": 2, "tp": 4, "ep": 4, "dtype": "bfloat16", "max_total_tokens": 1_500_000}}
    return minimal(placement="colocated", **{**given, **sections})


def totals(found: Budget) -> dict[DeviceTurn, int]:
    return {turn: sum(one.total for one in sides) for turn, sides in found.phases.items()}


def test_a_device_holds_one_side_and_what_the_other_keeps() -> None:
    """While weights move, both sides' weights and message buffers; nothing else of the trainer's 18 bytes a parameter."""
    found = budget.of_run(in_turn(), HF)
    trainer, engine = found.trainer, found.engine
    asleep = MESSAGES + ASLEEP
    assert totals(found) == {
        GENERATING: engine.total + asleep,
        TRAINING: trainer.total + asleep,
        WAKING: trainer.parts["weights"] + engine.parts["weights"] + 2 * MESSAGES + ASLEEP,
    }
    assert "staging" not in engine.parts
    assert found.host[PLACEMENT] == trainer.parts["weights"] + trainer.parts["optimizer"], "gradients are dropped"
    adapters = budget.of_run(in_turn(train="lora"), HF)
    assert adapters.engine.host[PLACEMENT] == adapters.engine.parts["weights"], "the trainer does not send them"
    assert adapters.phases[TRAINING][1].total == adapters.engine.parts["adapters"] + asleep, "SGLang allocates slots outside its saver"
    assert adapters.phases[GENERATING][0].total == asleep, "copies to send sleep with the parameters"
    sent = adapters.trainer.parts["adapters"] + adapters.trainer.parts["copies to send"]
    assert adapters.phases[WAKING][0].total == sent + MESSAGES, "weights under adapters sleep while these are sent"


def test_state_in_host_memory_does_not_move_again() -> None:
    half, whole = (budget.of_run(in_turn(trainer={**NODE, "memory": {"optimizer_offload": share}}), HF) for share in (0.5, 1))
    assert half.host[PLACEMENT] - whole.host[PLACEMENT] == half.trainer.parts["optimizer"]


@settings(max_examples=examples(60), deadline=None)
@given(
    sleeps=st.sets(st.sampled_from(sorted(SLEEPS))).map(frozenset),
    gpu_gb=st.floats(20, 200),
    keys=st.sampled_from([{}, {"pp": 2}, {"recompute": "none"}, {"memory": {"optimizer_offload": 0.5}}]),
    train=st.sampled_from(["full", "lora"]),
)
def test_in_turn_never_needs_more_than_the_sum_and_is_refused_if_a_phase_does_not_fit(
    sleeps: frozenset[str], gpu_gb: float, keys: dict[str, Any], train: str
) -> None:
    run = in_turn(train=train, trainer={**NODE, "ep": 4, **keys})
    stages = memory.trainer(HF, models.trainer_parallel(run), budget.training(run, HF))
    known = budget.of_run(run, HF)
    found = Budget(known.trainer, known.engine, gpu_gb, phases=phases(stages, known.engine, sleeps))
    every = phases(stages, known.engine)
    for turn, total in totals(found).items():
        assert max(found.trainer.total if turn is TRAINING else 0, found.engine.total if turn is GENERATING else 0) < total
        assert sum(one.total for one in every[turn]) <= total <= found.trainer.total + found.engine.total + ASLEEP
    refused = [turn for turn, total in totals(found).items() if total > memory.usable(gpu_gb)]
    assert [one.what for one in found.refusals] == [f"memory of a GPU while {turn}" for turn in refused]


def test_a_refusal_says_what_frees_the_memory() -> None:
    known = budget.of_run(in_turn(), HF)
    found = replace(known, phases=phases([known.trainer], known.engine, frozenset({"gradients", "parameters"})))
    (refusal,) = found.refusals
    ways = (
        "optimizer in trainer.sleep, or fewer tokens (engines.max_total_tokens, environment.max_tokens), or more GPUs and placement=split"
    )
    assert (refusal.what, refusal.hint) == ("memory of a GPU while generating", f"take {ways}")
    too_many = (totals(found)[GENERATING] - memory.usable(80.0)) / 1e9
    assert f"{too_many:.3g} GB too many" in str(refusal)
    neither = replace(known, gpu_gb=60.0).refusals
    assert all("placement=split" in str(one.got) and "placement" not in str(one.hint) for one in neither)


def test_a_machine_without_memory_for_what_sleeps_is_refused() -> None:
    for run, ranks in ((in_turn(), 0), (in_turn(train="lora"), 8)):
        found = budget.of_run(run, HF)
        needed = 8 * found.host[PLACEMENT] + ranks * found.engine.parts["weights"] + 8 * found.engine.host["keep.routing"]
        budget.check_host(run, found, round(needed / 0.9) + 9)
        with pytest.raises(ConfigError) as caught:
            budget.check_host(run, found, round(needed / 0.9) - 9)
        assert caught.value.what == PLACEMENT


def test_phases_are_of_the_largest_stage() -> None:
    stages = [GpuMemory({"weights": 5, "optimizer": 1}), GpuMemory({"weights": 1, "optimizer": 9})]
    found = phases(stages, GpuMemory({"weights": 2, "KV cache": 3}), cpu=True)
    assert [tuple(one.total for one in found[turn]) for turn in (GENERATING, TRAINING, WAKING)] == [(0, 5), (10, 0), (5, 2)]


def test_the_least_seconds_of_a_switch_are_bytes_over_a_bandwidth() -> None:
    run = in_turn()
    held = budget.of_run(run, HF)
    found = switch.of_run(run, HF)
    assert found["trainer_in"].nbytes == found["trainer_out"].nbytes == held.host[PLACEMENT]
    assert found["trainer_out"].seconds == held.host[PLACEMENT] / (0.9 * 64e9)
    assert found["engines_in"].nbytes == held.engine.parts["weights"]
    assert found["engines_in"].nbytes / (0.9 * 450e9) >= found["engines_in"].seconds > 0
    alone = switch.moves(0, 0, 0, Forecast(9000, 0, 0, 9000, 0.0, 9000), switch.H100)["engines_in"]
    assert alone == switch.Move(9000, 9000 * 2 / (0.9 * 3.35e12)), "on one device every byte is read and written"
    adapters = switch.of_run(in_turn(train="lora"), HF)
    assert adapters["trainer_in"].nbytes - adapters["trainer_out"].nbytes == held.trainer.parts["weights"], "they are kept once"
    assert adapters["engines_in"].seconds > held.engine.parts["weights"] / (0.9 * 64e9), "base weights come back from host memory"
    assert switch.bound(run, HF) == {name: move.seconds for name, move in found.items()}
    small = demo("placement=colocated", "queue.staleness.max_staleness=0")
    hf = budget.hf_of(small)
    (stage,) = memory.trainer(hf, models.trainer_parallel(small), budget.training(small, hf, cpu=True))
    assert switch.of_run(small, hf)["trainer_out"].nbytes == 2 * moved(stage), "both ranks write to one disk"
    assert budget.of_run(small, hf, cpu=True).host == {}


# ---------------------------------------------------------------- the host's memory


@pytest.mark.parametrize(("dtype", "weight", "plain"), [("bfloat16", 2, 14), ("float32", 4, 12)])
def test_one_rank_copies_its_weights_and_adams_state(dtype: str, weight: int, plain: int) -> None:
    parameters = memory.whole(SPARSE).all
    for dp, distributed, each in ((1, False, plain), (1, True, weight + 12), (2, True, weight + 6)):
        (stage,) = memory.trainer(SPARSE, MegatronParallel(dp=dp), Training(Microbatch(64, False, dtype), distributed))
        assert stage.host["trainer.async_save"] == each * parameters


def test_a_run_says_it_only_if_it_saves_so() -> None:
    without = budget.of_run(minimal(trainer={"dtype": "bfloat16"}), SPARSE)
    assert without.host == {}
    with_ = budget.of_run(minimal(trainer={"dtype": "bfloat16", "async_save": True}), SPARSE)
    assert with_.host == {"trainer.async_save": 14 * memory.whole(SPARSE).all}
    assert with_.trainer == without.trainer, "a GPU's memory is not the host's"
    cpu = budget.of_run(minimal(trainer={"dtype": "float32", "async_save": True}), SPARSE, budget.CPU_GB, True)
    assert cpu.trainer.parts["checkpoint copy"] == cpu.host["trainer.async_save"] == 12 * memory.whole(SPARSE).all


# ---------------------------------------------------------------- other families, worked out by hand


def test_parameters_of_deepseek_v3() -> None:
    """Small vectors' layers are whole on every rank; a router's bias has neither gradient nor moments."""
    down = 7168 * 1536 + 7168 * (512 + 64)
    up = 128 * 192 * 1536 + 128 * 256 * 512 + 7168 * 128 * 128
    norms = 2 * 7168 + 1536 + 512
    expert = shared = 3 * 7168 * 2048
    router, dense, table = 256 * 7168, 3 * 7168 * 18432, 129280 * 7168
    experts = 58 * 256 * expert
    others = 61 * (down + up + norms) + 3 * dense + 58 * (router + shared) + 2 * table + 7168
    assert others + experts == 671_026_404_352
    assert memory.whole(DEEPSEEK) == RankParameters(others, experts)
    mine = 61 * (down + up // 8 + norms) + 3 * dense // 8 + 58 * (router + shared // 8) + 2 * table // 8 + 7168
    held = memory.weights_of(DEEPSEEK, MegatronParallel(tp=8, ep=64, dp=16), 0, "bfloat16")
    assert (held.dense, held.experts) == (mine, 58 * 4 * expert)


@pytest.mark.parametrize("hf", MODELS.values(), ids=MODELS)
def test_a_rank_alone_holds_the_model(hf: dict[str, Any]) -> None:
    held, whole = memory.weights_of(hf, MegatronParallel(), 0, "float32"), memory.whole(hf)
    assert held.all == whole.all
    biases = 4 * sum(size[0] for name, size in family_of(hf).tensors(hf).items() if name.endswith("router_bias"))
    assert held.nbytes == 4 * whole.all + biases


def test_an_engine_keeps_the_layer_that_leads_up_twice_and_small_vectors_whole() -> None:
    """A token in the cache: 61 layers of 512 + 64, which are not divided over tensor-parallel ranks."""
    found = memory.engine(DEEPSEEK, EngineParallel(16, 16), EngineMemory(1000)).parts
    assert found["derived"] == 61 * 2 * 128 * 256 * 512 // 16
    assert found["KV cache"] == 70_272_000
    assert found["staging"] == found["weights"]
    assert "derived" not in memory.engine(GLM, EngineParallel(8, 8), EngineMemory(1000)).parts
