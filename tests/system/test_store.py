"""A whole run whose weights travel as files, every version checked."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from asyncmoe.version_store import Folder, VersionStore, of_run
from tests.system.runs import logs, marked_pids, metrics, refused, run, start, wait_for
from tests.system.test_journal import SHAPE, WARM, check, trained
from tests.system.test_restarts import lose

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


def test_a_run_outlives_its_only_engine_and_a_trainer_rank(tmp_path: Path) -> None:
    """An engine that starts again from nothing reads the version that is there; ranks of the trainer that start again go on there."""
    directory = tmp_path / "run"
    command = start(directory, *SHAPE, "sync.method=store", f"sync.store.url={tmp_path / 'versions'}", "trainer.checkpoint_every=0")
    assert wait_for(partial(trained, directory, 0, WARM + 2), 150), logs(directory)
    (server,) = marked_pids(command.mark, "--random-seed 0")
    last = metrics(directory)[-1]["step"]
    os.kill(server, signal.SIGKILL)
    assert wait_for(partial(trained, directory, 0, last + 2), 150), logs(directory)
    lose(directory, command, "trainer.1", signal.SIGKILL)
    status, _, error = command.finish()
    assert status == 0, error[-3000:] + logs(directory)
    assert command.gone(), command.alive()
    check(directory)
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["trainer_restarts"], summary["rejected_share"]) == (1, 0.0)
