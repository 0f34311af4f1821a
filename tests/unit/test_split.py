"""Splits of a cluster: they fit, they follow the rule, and one that does not fit is refused with a suggestion."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from test_memory import KIND, config

from asyncmoe import models
from asyncmoe.errors import ConfigError
from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.plan import budget, memory, render_plan, split
from asyncmoe.plan.split import Cluster
from benchmarks.published import REAL

HF = REAL["Qwen3-30B-A3B"]
LARGE = REAL["Qwen3-235B-A22B"]
DENSE = {key: value for key, value in HF.items() if "experts" not in key and "moe" not in key} | {"model_type": "qwen3"}


def test_two_nodes_for_all_weights_of_a_real_model() -> None:
    (only,) = split.suggest(HF, Cluster(2))
    assert (only.trainer_nodes, only.engine_nodes) == (1, 1)
    assert (only.trainer.parallel, only.trainer.recompute) == (MegatronParallel(tp=2, ep=8, dp=4), True)
    assert (only.engines, only.engine.parallel, only.engine.serving.staged) == (2, EngineParallel(4, 4), True)
    assert only.conversations(8192) == 2 * (only.engine.serving.tokens // 8192) > 2 * memory.LEAST


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
def test_what_is_suggested_fits_and_follows_the_rule(hf: dict[str, Any], cluster: Cluster) -> None:
    found = split.suggest(hf, cluster)
    first = found[0].trainer_nodes
    assert all(split.best_trainer(hf, cluster, nodes) is None for nodes in range(1, first))
    assert [one.trainer_nodes for one in found] == sorted({one.trainer_nodes for one in found} & {first, 2 * first, 4 * first})
    for one in found:
        assert one.trainer_nodes + one.engine_nodes == cluster.nodes
        assert one.trainer_nodes == first or one.trainer_nodes <= one.engine_nodes
        assert one.trainer.parallel.world == one.trainer_nodes * cluster.gpus
        assert one.engines * one.engine.parallel.world <= one.engine_nodes * cluster.gpus
        assert one.trainer.memory.fits(cluster.gpu_gb)
        assert one.engine.memory.fits(cluster.gpu_gb)
        family_of(hf).check(hf, one.trainer.parallel, one.engine.parallel)


def test_too_few_nodes_say_how_many_would_do() -> None:
    with pytest.raises(ConfigError, match="take at least 9 nodes, or train adapters") as caught:
        split.suggest(LARGE, Cluster(8))
    assert caught.value.got == 8
    assert split.suggest(LARGE, Cluster(9))[0].trainer_nodes == 8
    assert split.suggest(LARGE, Cluster(8, adapter=KIND))


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


@pytest.mark.parametrize("cluster", [Cluster(2), Cluster(9), Cluster(4, adapter=KIND)], ids=str)
def test_the_keys_that_are_printed_make_the_run_that_is_meant(cluster: Cluster) -> None:
    hf = LARGE if cluster.nodes == 9 else HF
    one = split.suggest(hf, cluster)[0]
    run = config(**yaml.safe_load("\n".join(render_plan.yaml_keys(one))))
    models.check(run, hf)
    assert models.trainer_parallel(run) == one.trainer.parallel
    found = budget.of_run(run, hf)
    assert (found.trainer, found.engine) == (one.trainer.memory, one.engine.memory)
    assert run.cluster.trainer_nodes + run.cluster.engine_nodes == cluster.nodes


def test_nodes_without_room_for_an_engine_are_refused() -> None:
    with pytest.raises(ConfigError, match="room for an engine with 8 conversations of 8192 tokens on 1 of 2 nodes"):
        split.suggest(LARGE, Cluster(2, gpus=4))
