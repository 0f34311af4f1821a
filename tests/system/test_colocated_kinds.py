"""Colocated runs of every kind: each version with which an engine wakes is compared, and trainer and engine agree on every token."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncmoe.models import family_of, load_hf_config
from tests import families, float8
from tests.system.runs import AGREES, ONE_RANK, Command, demo, engine_python, metrics, refused, run
from tests.system.test_colocated import COLOCATED, turns

pytestmark = pytest.mark.system
STEPS = ("warmup.steps=2", "run.steps=3", "trainer.optimizer.lr=1e-2", "scoring.scorer=tests.unit.scorers:length", "log.keep=all")
LORA = ("train=lora", "lora.rank=4", "lora.alpha=64")
TWO_STAGES = ("trainer.ep=1", "trainer.pp=2", "trainer.first_stage_layers=2")  # of three layers
HALF = ("trainer.dtype=bfloat16", "engines.dtype=bfloat16", "verify.max_logprob_diff=0.5")
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
    "bfloat16": ("moonlight", HALF),
    "reference": ("qwen3", (*ONE_RANK, "objective.kl.coefficient=0.01", "objective.updates_per_batch=2")),
    **{f"float8-{kind}": (kind, ONE_RANK) for kind in float8.MODELS},
}


@pytest.mark.parametrize("kind", [pytest.param(one, marks=() if one == "adapters-of-experts" else pytest.mark.thorough) for one in KINDS])
def test_a_kind_learns_in_turn_what_a_trainer_that_never_sleeps_learns(kind: str, tmp_path: Path) -> None:
    """From the same batches, by `replay`, bit for bit."""
    name, settings = KINDS[kind]
    quantised = kind.startswith("float8")
    if quantised:
        float8.write(float8.plain_model(tmp_path / "plain", name), tmp_path / "model")
    else:
        families.write(tmp_path / "model", name)
    hf = load_hf_config(tmp_path / "model")
    rate = 1e-3 if family_of(hf).shape_of(hf).router_bias and "train=lora" not in settings else 0.0
    checks = [one for one in COLOCATED if one != AGREES or not quantised]
    run(tmp_path / "run", *checks, *STEPS, f"trainer.router_bias_rate={rate}", *settings)
    assert turns(tmp_path / "run").count("generating") == 3
    told = [step for step in metrics(tmp_path / "run") if step["phase"] == "rl"]
    assert told[0]["grad_norm"] > 0, "and so every version differs, by Adam's averages"
    assert max(step["train_infer_kl"] for step in told) < 0.1
    assert "steps 3 to 5: bit-equal" in Command("replay", str(tmp_path / "run")).succeed()[0]


@pytest.mark.thorough
@pytest.mark.parametrize(("every", "found"), [(1, "checksums differ: model."), (0, "nothing wrote model.")])
def test_weights_that_an_engine_loses_in_its_sleep_are_found_before_it_samples(every: int, found: str, tmp_path: Path) -> None:
    """Those below adapters, which no update writes: this engine keeps no copy of them."""
    families.write(tmp_path / "model", "llama")
    forgets = 'for one do shift; [ "$one" = --enable-weights-cpu-backup ] || set -- "$@" "$one"; done'
    settings = (*COLOCATED, *STEPS, *ONE_RANK, *LORA, f"sync.verify_every={every}", "engines.restarts=0", engine_python(tmp_path, forgets))
    said = refused(*demo(tmp_path / "run", *settings))
    assert found in said + (tmp_path / "run" / "logs" / "controller.log").read_text()
    assert not [step for step in metrics(tmp_path / "run") if step["phase"] == "rl"]
