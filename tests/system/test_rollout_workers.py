"""A run whose episodes are in processes of their own: nothing is lost with one of them, and nothing trained twice.

`pytest -s` shows the times.
"""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.system.runs import ONE_RANK, Command, logs, metrics, provide, refused, start, wait_for
from tests.system.test_log import SHAPE, WARM, check, trained
from tests.system.test_restarts import pid_of

pytestmark = pytest.mark.system
TWO = ("rollout.workers=2", "engines.count=2", "sync.verify_every=1")


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.thorough)])
def test_a_run_outlives_a_rollout_worker(tmp_path: Path, number: signal.Signals) -> None:
    directory = tmp_path / "run"
    command = start(directory, *SHAPE, *TWO, *ONE_RANK)
    assert wait_for(partial(trained, directory, 0, WARM + 2), 150), logs(directory)
    others = [pid_of(directory, role) for role in ("controller", "trainer.0", "rollout.2")]
    last = metrics(directory)[-1]["step"]
    os.kill(pid_of(directory, "rollout.1"), number)
    assert wait_for(partial(trained, directory, 0, last + 2), 150), logs(directory)
    assert [pid_of(directory, role) for role in ("controller", "trainer.0", "rollout.2")] == others, "they were left alone"
    status, _, error = command.finish()
    assert status == 0, error[-3000:] + logs(directory)
    assert command.gone(), command.alive()
    check(directory, again=False)
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["max_abs_logprob_diff_same_version"] < 1e-4
    kept = [json.loads(line) for line in (directory / "samples" / "rollout.jsonl").read_text().splitlines() if line.endswith("}")]
    assert {member["key"] for one in kept if one["record"] == "group" for member in one["members"]}, "groups are kept to be read"
    assert "rollout worker 1 is lost" in (directory / "logs" / "controller.log").read_text()


def test_what_workers_cannot_do_is_refused_before_anything_starts(tmp_path: Path) -> None:
    overrides, expected = (
        ("rollout.workers=2", "rollout.max_concurrent=1"),
        "rollout.max_concurrent: got 1, expected at least rollout.workers = 2",
    )
    assert expected in refused("run", "examples/demo.yaml", f"run.dir={tmp_path / 'run'}", *overrides)
    assert not (tmp_path / "run").exists()
    assert "1 to 1, because rollout.workers is 1" in refused("worker", "examples/demo.yaml", f"run.dir={tmp_path / 'run'}", "--number", "2")


def test_a_worker_without_a_controller_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    model = provide(tmp_path / "model")
    command = Command("worker", "examples/demo.yaml", f"run.dir={tmp_path / 'run'}", f"model.path={model}")
    worker = psutil.Process(command.process.pid)

    def waits() -> bool:
        before = sum(worker.cpu_times()[:2])
        time.sleep(1.0)
        return 1.0 < before > sum(worker.cpu_times()[:2]) - 0.02

    assert wait_for(waits, 120)
    command.process.terminate()
    assert command.gone(20.0), command.alive()
