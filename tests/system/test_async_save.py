"""A run that writes its checkpoints while training goes on, interrupted and resumed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from asyncmoe import checkpoints
from asyncmoe.checkpoints import intact
from tests.system.runs import ONE_RANK, metrics, run, start, wait_for

pytestmark = pytest.mark.system


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_waits_for_the_checkpoint_and_the_run_resumes_from_it(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    saving = (*ONE_RANK, "trainer.async_save=true", "trainer.checkpoint_every=1")
    command = start(directory, "run.steps=200", *saving)
    assert wait_for(lambda: any(s["phase"] == "rl" for s in metrics(directory)), 120), command.process.poll()
    os.kill(command.process.pid, signal.SIGINT)
    status, _, error = command.finish(90)
    assert status == 130, error
    assert "Traceback" not in error
    assert "in use" not in error
    assert ", which is saved; the same command resumes from" in error
    assert command.gone(), command.alive()
    stopped = metrics(directory)[-1]["step"]
    newest = checkpoints.newest(directory)
    assert newest == checkpoints.directory(directory, stopped)
    assert intact.fault_in_share(newest, 0, 1) is None
    assert not list(newest.parent.glob("*.writing"))
    stood = [s["checkpoint_s"] for s in metrics(directory) if s.get("checkpoint_s") is not None]
    assert len(stood) >= stopped - 2, "a save after each step but the last"
    again = len((directory / "rollout.jsonl").read_text().splitlines())
    summary = run(directory, f"run.steps={stopped - 4 + 2}", *saving)
    records = [json.loads(line) for line in (directory / "rollout.jsonl").read_text().splitlines()]
    assert records[again]["started"] >= records[again - 1]["started"], "the ledger goes on"
    assert summary["steps"] == stopped - 4 + 2
    assert [s["step"] for s in metrics(directory)][-3:] == [stopped, stopped + 1, stopped + 2]
    assert checkpoints.newest(directory) == checkpoints.directory(directory, stopped + 2)
