"""Splits of a cluster: they fit, they follow the rule, and one that does not fit is refused with a suggestion."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_memory import KIND, config

from asyncmoe import models
from asyncmoe.config import load
from asyncmoe.errors import ConfigError, DataError
from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.plan import budget, memory, one_node, render_plan, speeds, split
from asyncmoe.plan.speeds import Measured, MeasuredLengths, MeasuredSide
from asyncmoe.plan.split import Cluster, Split
from asyncmoe.simulate.plant import Plant, read_plant
from asyncmoe.simulate.sweep import _splits
from asyncmoe.simulate.workload import parse
from benchmarks.published import FLOAT8, REAL
from tests.configs import minimal
from tests.unit.example_counts import examples

HF = REAL["Qwen3-30B-A3B"]
LARGE = REAL["Qwen3-235B-A22B"]
DEEPSEEK = {**REAL["DeepSeek-V3"], "quantization_config": FLOAT8}
DENSE = {key: value for key, value in HF.items() if "experts" not in key and "moe" not in key} | {"model_type": "qwen3"}
MEASURED = Measured(1, 30_532_122_624, MeasuredSide(8, 40_000), MeasuredSide(4, 8_000, 128), MeasuredLengths(200, 1_800))


def sides(one: Split) -> tuple[int, int]:
    return one.trainer_nodes, one.engine_nodes


def test_qwen3_30b_by_hand() -> None:
    """On 8 GPUs, tp 4 and ep 8; the parts of memory are those of test_memory.py."""
    (found,) = split.suggest(HF, Cluster(4))
    assert (sides(found), found.trainer.offload, found.trainer.recompute) == ((1, 3), 0, True)
    assert (found.trainer.parallel, found.engine.parallel) == (MegatronParallel(tp=4, ep=8, dp=2), EngineParallel(4, 4))
    assert found.trainer.memory.total == pytest.approx(72.1e9, rel=0.001)
    token = 48 * 2 * 128 * 2  # a rank has one of four key heads
    fixed = 2 * 61.1e9 / 4 + 2 * (256 << 20) + 134e6 + (512 + 1.5 * 8192 + 512 + 512) * (1 << 20)
    assert found.engine.serving.tokens == pytest.approx((76e9 - fixed) / token, rel=0.02)
    assert found.engines == 6
    assert found.conversations(8192) == 6 * (found.engine.serving.tokens // 8192)


@pytest.mark.parametrize(("nodes", "plain"), [(4, None), (5, None), (8, None), (9, (8, 1)), (16, (8, 8))])
def test_qwen3_235b_by_hand(nodes: int, plain: tuple[int, int] | None) -> None:
    """Three nodes hold weights and gradients, 235e9 x 6 bytes in 24 x 76 GB, with the optimizer in host memory: 16 bytes a parameter there.
    All 18 bytes a parameter fit into eight nodes."""
    found, *others = split.suggest(LARGE, Cluster(nodes))
    assert (sides(found), found.trainer.offload) == ((3, nodes - 3), 1.0)
    assert [sides(one) for one in others] == ([plain] if plain else [])
    assert all(one.trainer.offload == 0 for one in others)
    stage = (235.09e9 - 2 * 151936 * 4096) * 32 / 94  # the middle one has 32 of 94 layers, and no vocabulary
    assert 8 * found.trainer.memory.host["trainer.memory.optimizer_offload"] == pytest.approx(16 * stage, rel=0.001)
    assert 235.1e9 * 6 / 24 < found.trainer.memory.parts["weights"] + found.trainer.memory.parts["gradients"] < 1.15 * 235.1e9 * 6 / 24
    # An engine is a node: 470 GB / 8 of weights leave room only for a cache, and a version is received while it pauses.
    assert (found.engine.parallel, found.engine.serving.staged) == (EngineParallel(8, 8), False)
    assert found.engine.serving.tokens * 94 * 2 * 128 * 2 < 76e9 - 470e9 / 8


@pytest.mark.parametrize(("nodes", "engines"), [(10, 1), (16, 4), pytest.param(32, 12, marks=pytest.mark.thorough)])
def test_deepseek_v3_by_hand(nodes: int, engines: int) -> None:
    """Eight nodes hold weights and gradients, 671e9 x 6 bytes / 64 = 63 GB; an engine takes 16 GPUs, as 671 / 8 is above 80."""
    found = split.suggest(DEEPSEEK, Cluster(nodes))[0]
    assert (sides(found), found.trainer.offload, found.engines, found.engine.nodes) == ((8, nodes - 8), 1.0, engines, 2)
    assert found.engine.parallel == EngineParallel(16, 16, 8)
    copied = 61 * (24576 * 1536 + 32768 * 512 + 7168 * 16384) + 2 * 129280 * 7168  # of attention and the embedding, by each group
    weights = found.engine.memory.parts["weights"] * 16 - 7 * copied
    assert 671.0e9 + 671.0e9 * 4 / 128**2 < weights < 1.04 * 671.0e9, "bytes of float8, and what all ranks hold"
    assert found.trainer.memory.parts["weights"] > 2 * 671e9 / 64


@pytest.mark.parametrize(
    ("model", "gpu_gb", "whole", "groups", "grouped"),
    [("DeepSeek-V3", 80, 27, 8, 128), ("Kimi-K2", 141, 89, 16, 1200)],
)
def test_groups_hold_more_conversations(model: str, gpu_gb: float, whole: int, groups: int, grouped: int) -> None:
    """On 16 GPUs: without groups each GPU caches the same 61 x 576 numbers of a token."""
    hf = {**REAL[model], "quantization_config": FLOAT8}
    best = split.engine_over(hf, Cluster(1, 8, gpu_gb), 2)
    assert best is not None
    assert best.parallel == EngineParallel(16, 16, groups)
    assert groups * (best.serving.tokens // groups // 8192) == grouped
    held = best.memory.parts["KV cache"]
    assert held == best.serving.tokens // groups * 61 * 576 * 2
    longer = best.serving.tokens // groups + 1  # than one group's cache
    other = split.engine_over(hf, Cluster(1, 8, gpu_gb, longer), 2)
    assert other is not None
    assert other.serving.tokens // other.parallel.attn_dp >= longer
    assert memory.kv_room(hf, EngineParallel(16, 16), replace(best.serving, running=256), gpu_gb) // 8192 == whole


@pytest.mark.parametrize(
    ("hf", "cluster"),
    [
        (HF, Cluster(3)),
        (HF, Cluster(16, context=32768)),
        (HF, Cluster(16, gpus=4)),
        (HF, Cluster(5, adapter=KIND)),
        (HF, Cluster(12, gpu_gb=40.0)),
        (DENSE, Cluster(4, context=4096)),
        (DENSE, Cluster(6, gpus=6)),
        (LARGE, Cluster(32, gpu_gb=141.0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("measured", [None, MEASURED], ids=["estimated", "measured"])
def test_what_is_suggested_fits_and_follows_the_rule(hf: dict[str, Any], cluster: Cluster, measured: Measured | None) -> None:
    found = split.suggest(hf, cluster, measured)
    first = min(one.trainer_nodes for one in found)
    assert all(split.best_trainer(hf, cluster, nodes) is None for nodes in range(1, first))
    for one in found:
        assert one.trainer_nodes % one.least_nodes == 0
        assert one.trainer_nodes + one.engine_nodes == cluster.nodes
        assert one.trainer.parallel.world == one.trainer_nodes * cluster.gpus
        assert one.engines * one.engine.parallel.world <= one.engine_nodes * cluster.gpus
        assert one.trainer.memory.total + one.trainer.memory.margin <= memory.usable(cluster.gpu_gb)
        assert one.engine.memory.fits(cluster.gpu_gb)
        family_of(hf).check(hf, one.trainer.parallel, one.engine.parallel)
        assert min(one.trained, one.sampled) <= min(found[0].trained, found[0].sampled) or one.name == "without offload"


@settings(max_examples=examples(12), deadline=None)
@given(nodes=st.integers(2, 24), gpus=st.sampled_from([4, 8]), gb=st.sampled_from([80.0, 141.0]), best=st.floats(0.05, 0.95))
def test_every_split_that_the_printed_simulation_tries_fits(nodes: int, gpus: int, gb: float, best: float) -> None:
    hf, cluster = HF, Cluster(nodes, gpus, gb)
    try:
        found = split.suggest(hf, cluster)
    except ConfigError:
        return
    for one in found:
        plant = read_plant(render_plan.plant_keys(one, cluster, hf, None))
        tried = _splits(plant, best * plant.gpus)
        assert (one.trainer.parallel.world, one.engines) in {(part.trainer.gpus, part.engines.count) for part in tried}
        for part in tried:
            held, over = divmod(part.trainer.gpus, gpus)
            assert over == 0
            assert split.best_trainer(hf, cluster, held) is not None
            assert part.engines.count <= one.engine.count(nodes - held, gpus)


def test_too_few_nodes_say_how_many_would_do() -> None:
    with pytest.raises(ConfigError, match="take at least 4 nodes, or train adapters") as caught:
        split.suggest(LARGE, Cluster(3))
    assert caught.value.got == 3
    assert split.suggest(LARGE, Cluster(3, adapter=KIND))


def test_measured_speeds_scale_with_gpus_and_balance(tmp_path: Path) -> None:
    """A trainer's GPU has 5,000 tokens/s, 90 % of them sampled, an engine's 2,000: 3 of 8 nodes train 108,000, 5 generate 80,000."""
    balanced, smallest = split.suggest(HF, Cluster(8), MEASURED)
    assert (sides(balanced), sides(smallest)) == ((3, 5), (1, 7))
    assert [balanced.trained, balanced.sampled] == pytest.approx([24 * 5000 * 0.9, 40 * 2000])
    file = tmp_path / "measured.json"
    written = {"trainer": {"gpus": 8, "tokens": 1, "step_s": 1, "tokens_per_s": 40_000}, "lengths": {"prompt": 200, "response": 1_800}}
    sampled = {"engines": {"gpus": 4, "running": 128, "tokens_per_s": 8_000.0}, "parameters": 30_532_122_624}
    file.write_text(json.dumps({"format": 1, **written, **sampled}))
    assert speeds.read(file, HF) == MEASURED
    with pytest.raises(ConfigError, match=r"^--measured"):
        speeds.read(file, LARGE)
    file.write_text(json.dumps({"format": 1, **written}))
    with pytest.raises(DataError, match=r"measured\.json: got .*`(engines|parameters)`"):
        speeds.read(file)
    plant = Plant().having({"engines.gpus": 4, "engines.max_running": 128, "workload": "fixed:tokens=1800"}).at_speeds(MEASURED)
    assert plant.full_rate == pytest.approx(plant.engine_gpus * 2000)
    assert plant.trainer.step_s == pytest.approx(plant.batch * 2000 / (plant.trainer.gpus * 5000))


def test_the_estimated_lengths_are_half_the_context_on_average() -> None:
    cluster = Cluster(2)
    plant = read_plant(render_plan.plant_keys(split.suggest(HF, cluster)[0], cluster, HF, None))
    drawn = islice(parse(plant.workload).groups(8, 0), 4096)
    assert mean(turns[0] for group in drawn for turns, _ in group) == pytest.approx(4096, rel=0.02)


def test_an_engine_that_no_node_has_room_for_takes_the_fewest_that_have() -> None:
    deepseek, large = REAL["DeepSeek-V3"], Cluster(64, gpus=4)
    assert split.best_engine(LARGE, Cluster(64, gpus=8)).nodes == 1
    for hf, cluster, nodes in ((LARGE, large, 2), (deepseek, Cluster(200), 4), (deepseek, Cluster(200, gpu_gb=141.0), 2)):
        found = split.best_engine(hf, cluster)
        assert (found.nodes, found.parallel.tp % nodes) == (nodes, 0)
        assert found.parallel.tp > cluster.gpus * nodes // 2, "half the nodes have no room for it"
        assert found.memory.fits(cluster.gpu_gb)
    (first, *_) = split.suggest(LARGE, large)
    assert first.engine_nodes % 2 == 0
    assert first.engines == first.engine_nodes // 2 * (8 // first.engine.parallel.tp)
    keys = yaml.safe_load("\n".join(render_plan.yaml_keys(first)))
    assert keys["engines"]["nodes"] == 2
    assert keys["cluster"]["engine_nodes"] == first.engine_nodes


EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster" / "qwen3-30b-a3b.yaml"


@pytest.mark.parametrize(
    ("hf", "cluster"),
    [(HF, Cluster(2)), (LARGE, Cluster(9)), (HF, Cluster(4, adapter=replace(KIND, rank=64))), (DEEPSEEK, Cluster(16))],
    ids=["30B", "235B", "adapters", "float8"],
)
def test_the_keys_that_are_printed_make_the_run_that_is_meant(hf: dict[str, Any], cluster: Cluster) -> None:
    """By themselves, and pasted into an example."""
    hf = {**hf, "num_nextn_predict_layers": 0}
    for one in split.suggest(hf, cluster):
        values = yaml.safe_load("\n".join(render_plan.yaml_keys(one)))
        pasted = [
            f"{name}.{key}={json.dumps(value)}" if isinstance(whole, dict) else f"{name}={whole}"
            for name, whole in values.items()
            for key, value in (whole.items() if isinstance(whole, dict) else [("", whole)])
        ]
        for run in (config(**values), load(EXAMPLE, pasted)):
            models.check(run, hf)
            assert models.trainer_parallel(run) == one.trainer.parallel
            assert run.environment.max_tokens == cluster.context > run.rollout.max_new_tokens
            found = budget.of_run(run, hf)
            assert (found.trainer.parts, found.engine) == (one.trainer.memory.parts, one.engine.memory)
            assert run.cluster.trainer_nodes + run.cluster.engine_nodes == cluster.nodes


def test_engines_with_adapters_are_within_a_node_as_a_run_has_them() -> None:
    assert split.best_engine(LARGE, Cluster(64, gpus=4)).nodes == 2
    with pytest.raises(ConfigError, match="room for an engine"):
        split.best_engine(LARGE, Cluster(64, gpus=4, adapter=KIND))


def test_nodes_without_room_for_an_engine_are_refused() -> None:
    with pytest.raises(ConfigError, match="room for an engine with 8 conversations of 8192 tokens on 1 of 2 nodes"):
        split.suggest(LARGE, Cluster(2, gpus=4))


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


def test_a_machine_on_which_nothing_fits_is_refused() -> None:
    for cluster in (Cluster(1, gpus=2), Cluster(1, gpus=1, gpu_gb=60.0, adapter=KIND)):
        with pytest.raises(ConfigError) as caught:
            one_node.of_node(HF, cluster)
        assert ("--lora" in str(caught.value.hint)) == (cluster.adapter is None)
