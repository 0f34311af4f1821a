"""`run.mode`: one after the other, and one batch ahead, from end to end; each with a way of weight sync that is not the default."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.runs import metrics, run

# By default test_context tries sync, and all other runs try run.mode=async.
pytestmark = [pytest.mark.system, pytest.mark.thorough]


SYNCS = {"sync": ("sync.transport=gloo",), "one_step_off": ("sync.method=broadcast",)}


@pytest.mark.parametrize(("mode", "oldest"), [("sync", 0), ("one_step_off", 1)])
def test_batches_are_as_far_ahead_as_the_mode_says(tmp_path: Path, mode: str, oldest: int) -> None:
    """With fewer places at the engine than a batch has responses: a version that lands must not cut a batch in two."""
    directory = tmp_path / "run"
    shape = (
        "warmup.steps=0",
        "run.steps=5",
        "rollout.max_concurrent=6",
        "rollout.max_new_tokens=24",
        f"queue.staleness.max_staleness={oldest}",
    )
    summary = run(directory, f"run.mode={mode}", *shape, "sync.verify_every=1", *SYNCS[mode])
    assert summary["max_staleness_seen"] == oldest
    assert summary["max_abs_logprob_diff_same_version"] <= 1e-4
    assert 0 < summary["pause_ms_median"] <= 1e3 * summary["sync_seconds_median"]
    last = json.loads((directory / "rollout.jsonl").read_text().splitlines()[-1])
    assert last["dropped"] == {}
    assert last["rejected"] == {}
    # The first batch is sampled by the weights it is trained from; in one_step_off every other one by those before.
    assert [list(step["ages"]) for step in metrics(directory)] == [["0"]] + [[str(oldest)]] * 4
