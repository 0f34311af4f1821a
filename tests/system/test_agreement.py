"""Whole runs train on exactly what was sampled: the difference of engines and trainer, with and without recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.system.runs import AGREES, ONE_RANK, REPOSITORY, demo, json_lines, metrics, refused, run
from tests.unit.report_pages import data_of

pytestmark = pytest.mark.system

MIXTURE = "model.make={layers: 4, hidden: 128, experts: 32, experts_per_token: 4, expert_hidden: 128}"
STILL = ("warmup.steps=0", "run.steps=3", "trainer.optimizer.lr=1e-12")
"""The weights stay what they are: whatever differs is not staleness."""
GSM8K = REPOSITORY.parent / "shared" / "data" / "gsm8k" / "train.jsonl"


def test_ranks_that_share_sequences_train_what_the_engine_computes(tmp_path: Path) -> None:
    """GSM8K, where it is, one batch after the other, with masks, routes, a reference policy, two updates a batch and a way of weight sync
    that is not the default. With fewer engine slots than responses in a batch: a new version must not split a batch.
    """
    gsm8k = ("task.kind=jsonl", f"task.path={GSM8K}", "task.chat_template=true")
    directory = tmp_path / "run"
    summary = run(
        directory,
        *("trainer.cp=2", AGREES),
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
    *_, last = json_lines(directory / "rollout.jsonl")
    assert (last["dropped"], last["rejected"]) == ({}, {})


@pytest.mark.thorough
def test_one_batch_ahead_the_batch_is_of_the_version_before(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    ahead = ("run.mode=one_step_off", "queue.staleness.max_staleness=1", "warmup.steps=0", "run.steps=5", "sync.method=broadcast")
    summary = run(directory, *ahead, "rollout.max_concurrent=6", "rollout.max_new_tokens=24", "sync.verify_every=1")
    assert summary["max_abs_logprob_diff_same_version"] <= 1e-4
    *_, last = json_lines(directory / "rollout.jsonl")
    assert (last["dropped"], last["rejected"]) == ({}, {})
    # The first batch is sampled by the weights it is trained from.
    assert [list(step["ages"]) for step in metrics(directory)] == [["0"]] + [["1"]] * 4


@pytest.mark.thorough
def test_keeping_routes_closes_most_of_the_gap_between_half_and_full_precision(tmp_path: Path) -> None:
    found: dict[str, dict[str, Any]] = {}
    for keep in ("on", "off"):
        settings = ("rollout.max_new_tokens=48", "engines.dtype=bfloat16", *ONE_RANK, f"keep.routing={keep}")
        found[keep] = run(tmp_path / keep, MIXTURE, *STILL, *settings)
        (page,) = data_of(tmp_path / keep / "report.html")
        assert "train infer kl mean" in [row[0] for row in page["summary"]]
    print({keep: summary["train_infer_kl_mean"] for keep, summary in found.items()})
    assert found["off"]["train_infer_kl_mean"] >= 2 * found["on"]["train_infer_kl_mean"] > 0
    assert found["on"]["routing_mismatch_mean"] > 0.01  # what the trainer's router would have done otherwise
    assert found["off"]["routing_mismatch_mean"] is None


def test_too_large_a_mismatch_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    line = refused(*demo(run_dir, *ONE_RANK, *STILL, "engines.dtype=bfloat16", AGREES.replace("1.0e-3", "1.0e-12")))
    assert "max_logprob_diff is" in line
    assert not metrics(run_dir)
    assert not json_lines(run_dir / "rollout.jsonl")[-1]["dropped"]
