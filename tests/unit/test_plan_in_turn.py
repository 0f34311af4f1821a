"""Devices that trainer and engines use in turn: the memory of each phase, host memory, the least seconds of a switch, and one machine's
GPUs in turn and divided. tests/ranks/test_memory.py compares what sleeps with what real ranks keep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_memory import KIND

from asyncmoe import models
from asyncmoe.config import Config
from asyncmoe.errors import ConfigError
from asyncmoe.models import EngineParallel, MegatronParallel
from asyncmoe.models.payload import Payload
from asyncmoe.occupancy import DeviceTurn
from asyncmoe.plan import budget, memory, one_node, render_plan, switch
from asyncmoe.plan.budget import PLACEMENT, Budget
from asyncmoe.plan.memory import ASLEEP, GpuMemory
from asyncmoe.plan.phases import SLEEPS, moved, phases
from asyncmoe.plan.split import Cluster
from asyncmoe.plan.traffic import Forecast, foresee
from asyncmoe.reshard import plan
from benchmarks.published import REAL
from tests.configs import demo, minimal
from tests.unit.example_counts import examples
from tests.unit.test_planning import MODELS, command

HF = REAL["Qwen3-30B-A3B"]
GENERATING, TRAINING, WAKING = DeviceTurn.GENERATING, DeviceTurn.TRAINING, DeviceTurn.WAKING
MESSAGES = 2 * (256 << 20)
NODE = {"ranks": 8, "tp": 4, "ep": 8, "tokens_per_microbatch": 8192, "recompute": "full", "dtype": "bfloat16"}


def in_turn(**sections: Any) -> Config:
    given = {"trainer": NODE, "engines": {"count": 2, "tp": 4, "ep": 4, "dtype": "bfloat16", "max_total_tokens": 1_500_000}}
    return minimal(placement="colocated", **{**given, **sections})


def totals(found: Budget) -> dict[DeviceTurn, int]:
    return {turn: sum(one.total for one in sides) for turn, sides in found.phases.items()}


# ---------------------------------------------------------------- memory


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


# ---------------------------------------------------------------- a switch


def test_an_engine_rank_receives_from_its_own_device_without_a_link() -> None:
    """Against a complete plan: rank r of the trainer and rank 8 + r of the engines are on device r."""
    hf = {**REAL["Qwen3-30B-A3B"], "num_hidden_layers": 2, "num_experts": 8, "vocab_size": 512}
    trainer, engine = MegatronParallel(4, 1, 8, 1, 2), EngineParallel(4, 4)
    found, payload = foresee(hf, trainer, engine, 2, nic=0.5, first=0), Payload(hf)
    moved_ = plan(payload.tensors(), payload.trainer(trainer, "bfloat16"), payload.engines(engine, "bfloat16", 2, first=8)).transfers
    own = {one.destination: one.nbytes for one in moved_ if one.destination == one.source + 8}
    into = {rank: sum(one.nbytes for one in moved_ if one.destination == rank) for rank in range(8, 16)}
    out = [sum(one.nbytes for one in moved_ if one.source == rank and one.destination != rank + 8) for rank in range(8)]
    assert own
    assert (found.within, found.received, found.wire, found.sent) == (max(own.values()), max(into.values()), sum(out), max(out))
    assert found.seconds == max(*out, *(into[rank] - own.get(rank, 0) for rank in into)) / 0.5e9


def test_the_least_seconds_of_a_switch_are_bytes_over_a_bandwidth() -> None:
    run = in_turn()
    held = budget.of_run(run, HF)
    found = switch.of_run(run, HF)
    assert found["trainer_in"].nbytes == found["trainer_out"].nbytes == held.host[PLACEMENT]
    assert found["trainer_out"].seconds == held.host[PLACEMENT] / (0.9 * 64e9)
    assert found["engines_in"].nbytes == held.engine.parts["weights"]
    assert found["engines_in"].nbytes / (0.9 * 450e9) >= found["engines_in"].seconds > 0
    alone = switch.moves(0, 0, Forecast(9000, 0, 0, 9000, 0.0, 9000), switch.H100)["engines_in"]
    assert alone == switch.Move(9000, 9000 * 2 / (0.9 * 3.35e12)), "on one device every byte is read and written"
    adapters = switch.of_run(in_turn(train="lora"), HF)["engines_in"]
    assert adapters.seconds > held.engine.parts["weights"] / (0.9 * 64e9), "base weights come back from host memory"
    assert switch.bound(run, HF) == {name: move.seconds for name, move in found.items()}
    small = demo("placement=colocated", "queue.staleness.max_staleness=0")
    hf = budget.hf_of(small)
    (stage,) = memory.trainer(hf, models.trainer_parallel(small), budget.training(small, hf, cpu=True))
    assert switch.of_run(small, hf)["trainer_out"].nbytes == 2 * moved(stage), "both ranks write to one disk"
    assert budget.of_run(small, hf, cpu=True).host == {}


# ---------------------------------------------------------------- one machine


@pytest.mark.parametrize(
    "cluster",
    [Cluster(1), Cluster(1, gpu_gb=141.0), Cluster(1, gpus=4, adapter=KIND), Cluster(1, gpus=1, gpu_gb=180.0, adapter=KIND)],
    ids=str,
)
def test_the_keys_for_one_machine_make_runs_that_fit(cluster: Cluster) -> None:
    found = one_node.of_node(HF, cluster)
    assert [one.name for one in found] == ["colocated", *(["split"] if cluster.gpus > 1 else [])]
    for one in found:
        run = minimal(**yaml.safe_load("\n".join(render_plan.yaml_keys(one))))
        models.check(run, HF)
        held = budget.of_run(run, HF, cluster.gpu_gb)
        assert (run.in_turn, held.refusals) == (one.cluster.in_turn, ())
        assert (held.trainer.parts, held.engine.parts) == (one.trainer.memory.parts, one.engine.memory.parts)
        assert run.trainer.ranks + (0 if run.in_turn else run.engines.count * run.engines.tp) <= cluster.gpus
        assert run.engines.count * run.engines.tp <= cluster.gpus


def test_a_step_in_turn_is_the_sum_and_divided_the_longer_part(tmp_path: Path) -> None:
    command("--model", MODELS / "Qwen3-30B-A3B.json", "--nodes", 1, "--json", tmp_path / "plan.json")
    one, other = json.loads((tmp_path / "plan.json").read_text())["splits"]
    sampled = 384 * 8 * 4096
    for found in (one, other):
        assert found["step_s"]["generation"] == pytest.approx(sampled / found["sampled"])
        assert found["step_s"]["training"] == pytest.approx(sampled / found["trained"])
    kept = sum(one["trainer"]["memory"]["parts"][part] for part in ("weights", "optimizer"))
    arrive = max(one["update"]["within"] / (0.9 * 3.35e12 / 2), one["update"]["seconds"])
    assert one["step_s"]["switch"] == pytest.approx(2 * kept / (0.9 * 64e9) + arrive)
    assert one["step_s"]["in all"] == pytest.approx(sum(one["step_s"][part] for part in ("generation", "training", "switch")))
    assert other["step_s"]["in all"] == max(other["step_s"]["generation"], other["step_s"]["training"])


def test_a_machine_on_which_nothing_fits_is_refused() -> None:
    for cluster in (Cluster(1, gpus=2), Cluster(1, gpus=1, gpu_gb=141.0, adapter=KIND)):  # the second for two copies of its base weights
        with pytest.raises(ConfigError, match="--lora"):
            one_node.of_node(HF, cluster)
    command("--model", MODELS / "Qwen3-30B-A3B.json", "--nodes", 1, "--gpus-per-node", 1, "--gpu-gb", 180, "--lora", "rank=32")  # one way


def test_phases_are_of_the_largest_stage() -> None:
    small, large = GpuMemory({"weights": 5, "optimizer": 1}), GpuMemory({"weights": 1, "optimizer": 9})
    found = phases([small, large], GpuMemory({"weights": 2, "KV cache": 3}), cpu=True)
    assert {turn: tuple(one.total for one in sides) for turn, sides in found.items()} == {
        GENERATING: (0, 5),
        TRAINING: (10, 0),
        WAKING: (5, 2),
    }
