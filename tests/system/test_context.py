"""Whole runs whose ranks share sequences: context parallelism with a real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.runs import REPOSITORY, Command, logs, run

pytestmark = pytest.mark.system

SHARED = ("trainer.cp=2", "verify={logprobs_every: 1, max_logprob_diff: 1.0e-4}")
GSM8K = REPOSITORY.parent / "shared" / "data" / "gsm8k" / "train.jsonl"


@pytest.mark.skipif(not GSM8K.is_file(), reason="GSM8K's train.jsonl is not beside this checkout")
def test_gsm8k_is_trained_by_ranks_that_share_sequences(tmp_path: Path) -> None:
    """With masks, routes, a reference policy and two updates a batch; the engine computes what the trainer does."""
    summary = run(
        tmp_path / "run",
        *SHARED,
        *("task.kind=jsonl", f"task.path={GSM8K}", "task.chat_template=true", "scoring.scorer=math_verify", "rollout.max_new_tokens=48"),
        *("run.steps=2", "warmup.steps=2", "rollout.top_p=0.9", "rollout.top_k=50", "objective.updates_per_batch=2"),
        *("objective.kl={coefficient: 0.01, estimator: unbiased}", "sync.verify_every=1"),
    )
    assert summary["steps"] == 2
    assert 0 < summary["max_abs_logprob_diff_same_version"] <= 1e-4
    assert summary["routing_mismatch_mean"] is not None


@pytest.mark.thorough
def test_an_agent_with_tools_is_trained_by_ranks_that_share_sequences(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    where = (f"run.dir={directory}", f"model.path={directory / 'model'}", "telemetry.live=off", "run.steps=20")
    command = Command("run", "examples/agents/tools.yaml", *where, *SHARED)
    status, out, error = command.finish(560.0)
    assert status == 0, f"status {status}\n{out[-1500:]}\n{error[-3000:]}\n{logs(directory)}"
    assert command.gone(), command.alive()
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["max_abs_logprob_diff_same_version"] <= 1e-4
    assert summary["reward_last"] > summary["reward_first"] + 0.3
