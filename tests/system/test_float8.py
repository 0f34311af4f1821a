"""Whole runs on float8 checkpoints, as published for DeepSeek-V3: engines in float8, a trainer in its own dtype."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncmoe.models import load_hf_config
from tests import float8
from tests.system.runs import Command, metrics, run

pytestmark = [pytest.mark.system, pytest.mark.thorough]
TRAINER = ("trainer.ranks=1", "trainer.ep=1", "warmup.steps=2", "warmup.lr=1e-3", "sync.verify_every=1")


@pytest.mark.parametrize("kind", float8.MODELS)
def test_a_model_of_float8_is_trained_resumed_exported_and_trained_again(kind: str, tmp_path: Path) -> None:
    """Both ways to the engines, which check every version; each sampled token is the engine's own, whatever its weights were rounded to."""
    model, directory = tmp_path / "model", tmp_path / "run"
    float8.write(float8.plain_model(tmp_path / "plain", kind), model)
    run(directory, *TRAINER, "run.steps=3")
    summary = run(directory, *TRAINER, "run.steps=5", "sync.method=broadcast")
    assert summary["steps"] == 5
    assert [step["step"] for step in metrics(directory)] == list(range(1, 8))
    # Engines compute with weights rounded to 3 bits of mantissa: apart, but about the same tokens. Of stale tokens the age tells more.
    fresh = [step["train_infer_kl"] for step in metrics(directory) if step["phase"] == "rl" and not step["staleness_mean"]]
    assert 0 < min(fresh) <= max(fresh) < 0.1
    for form, out in ((), tmp_path / "weights"), (("--float8",), tmp_path / "model-again"):
        Command("export", str(directory), str(out), *form).succeed()
    wanted = float8.quantised_weights(load_hf_config(model), float8.read(tmp_path / "weights"))
    found = float8.read(tmp_path / "model-again")
    assert found.keys() == wanted.keys()
    assert all(float8.same(found[name], value) for name, value in wanted.items())
    again = ("warmup.steps=0", "run.steps=1", f"model.path={tmp_path / 'model-again'}")
    assert run(tmp_path / "again", *TRAINER, *again)["steps"] == 1
