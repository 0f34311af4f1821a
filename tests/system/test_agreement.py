"""What was sampled is what is trained, in whole runs: how far engines and trainer are apart, with and without what engines record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.system.runs import ONE_RANK, metrics, provide, refused, run
from tests.unit.report_pages import data_of

pytestmark = pytest.mark.system

MIXTURE = "model.make={layers: 4, hidden: 128, experts: 32, experts_per_token: 4, expert_hidden: 128}"
STILL = ("warmup.steps=0", "run.steps=3", "trainer.optimizer.lr=1e-12")
"""The weights stay what they are: whatever differs is not staleness."""


@pytest.mark.thorough
def test_keeping_routes_closes_most_of_the_gap_between_half_and_full_precision(tmp_path: Path) -> None:
    found: dict[str, dict[str, Any]] = {}
    for keep in ("on", "off"):
        settings = ("rollout.max_new_tokens=48", "engines.dtype=bfloat16", "trainer.ranks=1", "trainer.ep=1", f"keep.routing={keep}")
        found[keep] = run(tmp_path / keep, MIXTURE, *STILL, *settings)
        (page,) = data_of(tmp_path / keep / "report.html")
        assert "train infer kl mean" in [row[0] for row in page["summary"]]
    print({keep: summary["train_infer_kl_mean"] for keep, summary in found.items()})
    assert found["off"]["train_infer_kl_mean"] >= 2 * found["on"]["train_infer_kl_mean"] > 0
    assert found["on"]["routing_mismatch_mean"] > 0.01  # what the trainer's router would have done otherwise
    assert found["off"]["routing_mismatch_mean"] is None


@pytest.mark.thorough  # of ranks that share sequences, and one after the other: test_context; without masks and ahead: test_runs
def test_a_run_with_masks_a_reference_and_checks_agrees_from_step_to_step(tmp_path: Path) -> None:
    summary = run(
        tmp_path / "run",
        "warmup.steps=0",
        "run.steps=4",
        "rollout.top_p=0.9",
        "rollout.top_k=20",
        "objective.updates_per_batch=2",
        "objective.kl={coefficient: 0.01, estimator: unbiased}",
        "objective.correction={token_band: [0.5, 5.0]}",
        "verify.max_logprob_diff=1.0e-3",
    )
    assert summary["max_abs_logprob_diff_same_version"] <= 1e-4
    steps = metrics(tmp_path / "run")
    assert steps[0]["kl_reference"] < 1e-6 < steps[-1]["kl_reference"]  # the second update's share of step 0 is small
    assert all(0 <= share <= 1 for step in steps for share in step["routing_mismatch"].values())


@pytest.mark.thorough
def test_interleaved_stages_and_resumed_responses_agree_too(tmp_path: Path) -> None:
    summary = run(
        tmp_path / "run",
        MIXTURE,
        *("warmup.steps=2", "run.steps=4", "sync.method=reshard", "sync.verify_every=1"),
        *("trainer.ep=1", "trainer.pp=2", "trainer.vpp=2", "trainer.recompute=full", "trainer.tokens_per_microbatch=64"),
        *("rollout.max_new_tokens=40", "rollout.interruption=abort_resume", "verify.max_logprob_diff=1.0e-3"),
    )
    assert summary["steps"] == 4
    assert summary["routing_mismatch_mean"] is not None
    rollout = [json.loads(line) for line in (tmp_path / "run" / "rollout.jsonl").read_text().splitlines()]
    assert rollout[-1]["lost_tokens"] == 0


def test_too_large_a_mismatch_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    model = f"model.path={provide(tmp_path / 'model')}"
    verify = "verify.max_logprob_diff=1.0e-12"
    small = ("rollout.groups_per_step=4", "rollout.group_size=4")
    line = refused("run", "examples/demo.yaml", f"run.dir={run_dir}", model, *small, *ONE_RANK, *STILL, "engines.dtype=bfloat16", verify)
    assert "max_logprob_diff is" in line
    assert not metrics(run_dir)
    assert not json.loads((run_dir / "rollout.jsonl").read_text().splitlines()[-1])["dropped"]
