"""What settings save of a trainer GPU's memory: context parallelism, and the section `trainer.memory`."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from asyncmoe import models
from asyncmoe.config import parse
from asyncmoe.errors import ConfigError
from asyncmoe.models import MegatronParallel, family_of
from asyncmoe.plan import activations, budget, memory, render_plan, split
from asyncmoe.plan.activations import Microbatch
from asyncmoe.plan.sizes import context_ranks, parse_trainer, trainer_text
from asyncmoe.plan.split import Cluster
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


def test_a_latent_key_travels_as_it_is_attended_to() -> None:
    """DeepSeek-V3: 192 dimensions of a key and 128 of a value for each of 128 heads; on a CPU a value is padded to the key."""
    hf = REAL["DeepSeek-V3"]
    m = family_of(hf).shape_of(hf)
    assert activations.gathered(m, MegatronParallel(tp=8, dp=2), Microbatch(100, False, cp=2)) == 200 * 16 * (192 + 128) * 2
    held = activations.gathered(m, MegatronParallel(tp=8, dp=2), Microbatch(100, False, "float32", cp=2))
    assert held == 200 * 16 * (192 + 192) * 4 * 2, "and the gradients of all of them"


def test_the_command_line_has_context_parallel_ranks() -> None:
    text = "tp=2,dp=2,cp=4"
    assert parse_trainer(text) == MegatronParallel(tp=2, dp=8)
    assert context_ranks(text) == 4
    assert trainer_text(parse_trainer(text), 4) == text
    assert trainer_text(parse_trainer("tp=2,dp=8")) == "tp=2,dp=8"
    for wrong in ("cp=0", "cp=2,cp=2", "cp=x"):
        with pytest.raises(ConfigError, match=r"cp|--trainer"):
            parse_trainer(wrong)


def test_long_contexts_are_divided_where_they_do_not_fit_whole() -> None:
    hf, cluster = HF, Cluster(4, context=262144)
    one = split.suggest(hf, cluster)[0]
    assert one.trainer.cp > 1
    assert cluster.context >= one.trainer.cp * 8192
    config = parse(BASE | yaml.safe_load("\n".join(render_plan.yaml_keys(one))))
    models.check(config, hf)
    assert config.trainer.cp == one.trainer.cp
    assert budget.of_run(config, hf).trainer == one.trainer.memory
    training = split._training(cluster, one.trainer.recompute, one.engines)
    assert not max(memory.trainer(hf, one.trainer.parallel, training), key=lambda stage: stage.total).fits(cluster.gpu_gb)


def test_cp_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer.ranks: got 8, expected a multiple of tp \* cp \* pp = 12"):
        parse({**BASE, "trainer": {"ranks": 8, "tp": 4, "cp": 3}})
