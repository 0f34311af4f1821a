"""A whole run whose weights travel as files, every version checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncmoe.version_store import Folder, VersionStore, of_run
from tests.system.runs import metrics, refused, run

pytestmark = [pytest.mark.system, pytest.mark.thorough]


def test_a_run_publishes_through_a_directory_and_another_run_is_refused_there(tmp_path: Path) -> None:
    directory, versions = tmp_path / "run", tmp_path / "versions"
    through = ("sync.method=store", f"sync.store.url={versions}")
    summary = run(directory, *through, "sync.verify_every=1", "verify.logprobs_every=1", "warmup.steps=0")
    assert summary["max_abs_logprob_diff_same_version"] <= 1e-4
    assert summary["pause_ms_median"] > 0
    store = VersionStore(Folder(versions), of_run.run_of(directory))
    newest = store.newest()
    assert newest is not None
    assert newest.version.step >= 2
    assert len(newest.ranks) == 2
    assert all(newest.ranks), "both trainer ranks wrote a part"
    assert [step["step"] for step in metrics(directory)] == [1, 2, 3]
    last = json.loads((directory / "rollout.jsonl").read_text().splitlines()[-1])
    assert last["rejected"] == {}
    assert not (versions / "meetings").exists() or not any(path.is_file() for path in (versions / "meetings").rglob("*"))
    model = f"model.path={tmp_path / 'model'}"
    line = refused("run", "examples/demo.yaml", f"run.dir={tmp_path / 'other'}", model, *through)
    assert "got versions of run" in line
