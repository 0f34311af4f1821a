"""Whole runs whose ranks share sequences: context parallelism with a real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.runs import REPOSITORY, Command, logs, metrics, run

pytestmark = pytest.mark.system

SHARED = ("trainer.cp=2", "verify.max_logprob_diff=1.0e-4")
GSM8K = REPOSITORY.parent / "shared" / "data" / "gsm8k" / "train.jsonl"


def test_ranks_that_share_sequences_train_what_the_engine_computes(tmp_path: Path) -> None:
    """GSM8K, where it is, one batch after the other, with masks, routes, a reference policy, two updates a batch and a way of weight sync
    that is not the default. With fewer places at the engine than a batch has responses: a version that lands must not cut a batch in two.
    """
    gsm8k = ("task.kind=jsonl", f"task.path={GSM8K}", "task.chat_template=true")
    directory = tmp_path / "run"
    summary = run(
        directory,
        "trainer.cp=2",
        "verify.max_logprob_diff=1.0e-4",
        *(gsm8k if GSM8K.is_file() else ()),
        "scoring.scorer=tests.unit.scorers:length",
        *("run.steps=3", "warmup.steps=0", "run.mode=sync", "queue.staleness.max_staleness=0"),
        *("rollout.max_new_tokens=32", "rollout.max_concurrent=6", "rollout.top_p=0.9", "rollout.top_k=50"),
        *("objective.updates_per_batch=2", "objective.correction={token_band: [0.5, 5.0]}"),
        *("objective.kl={coefficient: 0.01, estimator: unbiased}",),
        *("sync.transport=gloo", "sync.verify_every=1"),
    )
    assert (summary["steps"], summary["max_staleness_seen"]) == (3, 0)
    assert 0 < summary["max_abs_logprob_diff_same_version"] <= 1e-4
    assert summary["routing_mismatch_mean"] is not None
    assert 0 < summary["pause_ms_median"] <= 1e3 * summary["sync_seconds_median"]
    steps = metrics(directory)
    assert [list(step["ages"]) for step in steps] == [["0"]] * 3
    assert min(step["grad_norm"] for step in steps) > 0, "every step changed the weights"
    assert 0 < steps[0]["kl_reference"] < steps[-1]["kl_reference"], "of step 0 only the second update is away from the reference"
    assert steps[-1]["kl_reference"] > 1e-6
    assert all(0 <= share <= 1 for step in steps for share in step["routing_mismatch"].values())
    last = json.loads((directory / "rollout.jsonl").read_text().splitlines()[-1])
    assert (last["dropped"], last["rejected"]) == ({}, {})
    log = "".join(path.read_text() for path in (directory / "logs").glob("trainer*.log"))
    assert "engine and trainer at version 0: |difference| max" in log
    assert "experts by layer: 0:" in log


@pytest.mark.thorough
def test_an_agent_with_tools_is_trained_by_ranks_that_share_sequences(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    where = (f"run.dir={directory}", f"model.path={directory / 'model'}", "run.steps=20")
    command = Command("run", "examples/agents/tools.yaml", *where, *SHARED)
    status, out, error = command.finish(560.0)
    assert status == 0, f"status {status}\n{out[-1500:]}\n{error[-3000:]}\n{logs(directory)}"
    assert command.gone(), command.alive()
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["max_abs_logprob_diff_same_version"] <= 1e-4
    assert summary["reward_last"] > summary["reward_first"] + 0.3
