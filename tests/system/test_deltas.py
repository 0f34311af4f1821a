"""A whole run whose engines get deltas, in bfloat16: at a small learning rate few of the bits that they store change in a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import families
from tests.system.runs import ONE_RANK, metrics, run

pytestmark = pytest.mark.system


def test_engines_get_what_changed_and_hold_what_the_trainer_has(tmp_path: Path) -> None:
    """Checksums of every version are compared."""
    directory = tmp_path / "run"
    shape = ("trainer.dtype=bfloat16", "engines.dtype=bfloat16", "warmup.steps=1", "run.steps=4", "trainer.optimizer.lr=1e-6")
    sync = ("sync.delta=auto", "sync.verify_every=1")
    summary = run(directory, *shape, *ONE_RANK, *sync, "verify.logprobs_every=0")
    assert summary["steps"] == 4
    updates = [step for step in metrics(directory) if step.get("sync_bytes")]
    deltas = [step for step in updates if step.get("sync_changed") is not None]
    whole = max(step["sync_bytes"] for step in updates)
    assert len(deltas) >= 2
    assert all(0 < step["sync_changed"] < 0.1 and step["sync_bytes"] < whole / 4 for step in deltas)


@pytest.mark.thorough
@pytest.mark.parametrize("family", families.MODELS)
def test_fifty_steps_of_a_family_while_the_learning_rate_falls(family: str, tmp_path: Path) -> None:
    """From 1e-3, where most bfloat16 weights change in a step and updates are full, to 1e-7; checksums of every tenth version are
    compared. Whatever is refused goes out in full."""
    families.write(tmp_path / "model", family)
    directory = tmp_path / "run"
    shape = ("trainer.dtype=bfloat16", "engines.dtype=bfloat16", "trainer.ranks=1", "trainer.ep=1", "warmup.steps=1", "run.steps=50")
    rates = ("trainer.optimizer={lr: 1.0e-3, min_lr: 1.0e-7, decay: cosine}",)
    sync = ("sync.delta=auto", "sync.verify_every=10")
    summary = run(directory, *shape, *rates, *sync, "verify.logprobs_every=0", timeout_s=1200.0)
    assert summary["steps"] == 50
    updates = [step for step in metrics(directory) if step.get("sync_bytes")]
    shares = [step["sync_changed"] for step in updates if step.get("sync_changed") is not None]
    assert len(updates) >= 49
    assert len(shares) >= 20
    assert shares[-1] < 0.02 < max(shares), "the share falls with the learning rate"
    assert "refused" not in (directory / "logs" / "trainer.log").read_text()
