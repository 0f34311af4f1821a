"""Host memory for checkpoints that are written while training goes on; tests/ranks/test_async_save.py compares it with real copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_models_plan import SMALL

from asyncmoe.config import parse
from asyncmoe.models import MegatronParallel
from asyncmoe.plan import budget, host, memory
from asyncmoe.plan.activations import Microbatch
from asyncmoe.plan.memory import Training

HF: dict[str, Any] = {**SMALL, "mlp_only_layers": []}


@pytest.mark.parametrize(("dtype", "weight", "plain"), [("bfloat16", 2, 14), ("float32", 4, 12)])
def test_one_rank_copies_its_weights_and_adams_state(dtype: str, weight: int, plain: int) -> None:
    parameters = memory.whole(HF).all
    training = Training(Microbatch(64, False, dtype, None), distributed=False)
    assert host.checkpoint_copy(HF, MegatronParallel(), training) == plain * parameters
    assert host.checkpoint_copy(HF, MegatronParallel(), replace(training, distributed=True)) == (weight + 12) * parameters
    shared = host.checkpoint_copy(HF, MegatronParallel(dp=2), replace(training, distributed=True))
    assert shared == (weight + 6) * parameters


def test_a_run_says_it_only_if_it_saves_so() -> None:
    values = {"run": {"dir": "run", "steps": 1}, "model": {"path": "model"}, "task": {"kind": "arithmetic"}}
    without = budget.of_run(parse({**values, "trainer": {"dtype": "bfloat16"}}), HF)
    assert without.host == {}
    with_ = budget.of_run(parse({**values, "trainer": {"dtype": "bfloat16", "async_save": True}}), HF)
    assert with_.host == {"trainer.async_save": 14 * memory.whole(HF).all}
    assert with_.trainer == without.trainer, "a GPU's memory is not the host's"
    cpu = budget.of_run(parse({**values, "trainer": {"dtype": "float32", "async_save": True}}), HF, budget.CPU_GB, True)
    assert cpu.trainer.parts["checkpoint copy"] == cpu.host["trainer.async_save"] == 12 * memory.whole(HF).all
