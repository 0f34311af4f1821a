"""Colocated runs of every kind: each version that an engine wakes with is compared, and it and the trainer agree on every token."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncmoe.models import family_of, load_hf_config
from tests import families, float8
from tests.system.runs import AGREES, ONE_RANK, metrics, run
from tests.system.test_colocated import COLOCATED, turns

pytestmark = pytest.mark.system
LORA = ("train=lora", "lora.rank=4", "lora.alpha=64")
TWO_STAGES = ("trainer.ep=1", "trainer.pp=2", "trainer.first_stage_layers=2")  # of three layers
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{family: (family, ONE_RANK) for family in families.MODELS},
    **{f"{family}-adapters": (family, (*ONE_RANK, *LORA)) for family in ("llama", "deepseek")},
    "adapters-of-experts": ("qwen3_moe", (*LORA, "engines.tp=2")),
    "adapters-shared-outer": ("qwen3_moe", (*LORA, "lora.experts=shared_outer", "trainer.tp=2")),
    "wider-engine": ("qwen3_moe", (*ONE_RANK, "engines.tp=2")),
    "wider-trainer": ("deepseek", ("trainer.tp=2",)),
    "experts-spread-on-both": ("glm", ("engines.tp=2", "engines.ep=2")),
    "two-engines": ("mixtral", (*ONE_RANK, "engines.count=2")),
    "stages": ("deepseek", (*TWO_STAGES, "engines.tp=2")),
    "stages-adapters": ("qwen3_moe", (*TWO_STAGES, *LORA)),
    "context": ("qwen3_moe", ("trainer.ep=1", "trainer.cp=2")),
    "bfloat16": ("moonlight", ("trainer.dtype=bfloat16", "engines.dtype=bfloat16", "verify.max_logprob_diff=0.5")),
    "reference": ("qwen3", (*ONE_RANK, "objective.kl.coefficient=0.01", "objective.updates_per_batch=2")),
    **{f"float8-{kind}": (kind, ONE_RANK) for kind in float8.MODELS},
}


@pytest.mark.parametrize("kind", [pytest.param(one, marks=() if one == "adapters-of-experts" else pytest.mark.thorough) for one in KINDS])
def test_a_kind_learns_in_turn(kind: str, tmp_path: Path) -> None:
    name, settings = KINDS[kind]
    quantised = kind.startswith("float8")
    if quantised:
        float8.write(float8.plain_model(tmp_path / "plain", name), tmp_path / "model")
    else:
        families.write(tmp_path / "model", name)
    hf = load_hf_config(tmp_path / "model")
    shape = family_of(hf).shape_of(hf)
    rate = 1e-3 if shape.router_bias and "train=lora" not in settings else 0.0
    checks = [one for one in COLOCATED if one != AGREES or not quantised]
    steps = ("warmup.steps=2", "run.steps=3", "trainer.optimizer.lr=1e-2", "scoring.scorer=tests.unit.scorers:length")
    run(tmp_path / "run", *checks, *steps, f"trainer.router_bias_rate={rate}", *settings)
    assert turns(tmp_path / "run").count("generating") == 3
    told = [step for step in metrics(tmp_path / "run") if step["phase"] == "rl"]
    assert min(step["grad_norm"] for step in told) > 0, "every version differs"
    assert max(step["train_infer_kl"] for step in told) < 0.1
