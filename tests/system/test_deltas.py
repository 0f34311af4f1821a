"""A whole run whose engines get deltas, in bfloat16: at a small learning rate few of the bits that they store change in a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.runs import ONE_RANK, metrics, run

pytestmark = pytest.mark.system


def test_engines_get_what_changed_and_hold_what_the_trainer_has(tmp_path: Path) -> None:
    """Checksums of every version are compared."""
    directory = tmp_path / "run"
    shape = ("trainer.dtype=bfloat16", "engines.dtype=bfloat16", "warmup.steps=1", "run.steps=4", "trainer.optimizer.lr=1e-6")
    sync = ("sync.delta=auto", "sync.verify_every=1")
    summary = run(directory, *shape, *ONE_RANK, *sync)
    assert summary["steps"] == 4
    updates = [step for step in metrics(directory) if step.get("sync_bytes")]
    deltas = [step for step in updates if step.get("sync_changed") is not None]
    whole = max(step["sync_bytes"] for step in updates)
    assert len(deltas) >= 2
    assert all(0 < step["sync_changed"] < 0.1 and step["sync_bytes"] < whole / 4 for step in deltas)
