"""A trainer that is lost starts again in place: controller and engine go on, and everything is trained once.

`pytest -s` shows the times.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from asyncmoe.telemetry import processes
from tests.system.runs import Command, logs, marked_pids, metrics, nccl_settings, start, wait_for
from tests.system.test_log import SHAPE, WARM, check, trained

pytestmark = pytest.mark.system
ENGINE = "sglang"


def pid_of(directory: Path, role: str) -> int:
    """Of a process that the run has recorded, and that runs."""
    (found,) = [one for one in processes.read(directory) if one.role == role]
    assert processes.runs(found), f"{role} does not run"
    return found.pid


def lose(directory: Path, command: Command, role: str, number: signal.Signals) -> float:
    """Send a rank a signal, and wait until the trainer has trained beyond what it had; returns the seconds."""
    lines, last = len(metrics(directory)), metrics(directory)[-1]["step"]
    others = (pid_of(directory, "controller"), marked_pids(command.mark, ENGINE))
    begin = time.monotonic()
    os.kill(pid_of(directory, role), number)
    assert wait_for(partial(trained, directory, lines + 1, last + 1), 150), logs(directory)
    seconds = time.monotonic() - begin
    assert (pid_of(directory, "controller"), marked_pids(command.mark, ENGINE)) == others, "they were left alone"
    return seconds


@pytest.mark.thorough  # a rank that is killed: below
def test_ranks_that_are_lost_cost_neither_the_engine_nor_a_sample(tmp_path: Path) -> None:
    losses = (("trainer.0", signal.SIGKILL), ("trainer.1", signal.SIGSEGV), ("trainer.1", signal.SIGSTOP))
    draw, at = random.Random(len(losses)), WARM + 2
    directory = tmp_path / "run"
    command = start(directory, *SHAPE, "trainer.checkpoint_every=3", "trainer.timeout_s=20", "watch.stacks_after_s=10")
    for role, number in losses:
        before = len(metrics(directory))
        assert wait_for(partial(trained, directory, before, at), 150), logs(directory)
        seconds = lose(directory, command, role, number)
        print(json.dumps({"lost": role, "by": number.name, "seconds_to_a_new_step": round(seconds, 2)}))
        at = min(metrics(directory)[-1]["step"] + draw.randrange(0, 2), WARM + 7)
    status, out, error = command.finish()
    assert status == 0, error[-3000:] + logs(directory)
    assert command.gone(), command.alive()
    said = [line.partition(": ")[2] for line in out.splitlines() if line.startswith("the trainer starts again, restart 1 of 2 ")]
    print(*said, sep="\n")
    causes = {signal.SIGSTOP: "trainer.1 has been silent for"}
    assert [causes.get(number, f"a rank was ended by {number.name}") in why for (_, number), why in zip(losses, said, strict=True)] == [
        True
    ] * len(losses)
    check(directory)
    assert json.loads((directory / "summary.json").read_text())["trainer_restarts"] == len(losses)


@pytest.mark.parametrize(
    ("part", "number"),
    [
        ("", signal.SIGKILL),
        pytest.param("sglang::scheduler", signal.SIGSTOP, marks=pytest.mark.thorough),
        pytest.param("sglang::detokenizer", signal.SIGKILL, marks=pytest.mark.thorough),
    ],
)
def test_a_run_outlives_its_only_engine_and_then_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, number: signal.Signals
) -> None:
    """Neither costs the others or a sample, and the next engine has the settings of NCCL of the first. Updates are deltas, but the first to
    an engine that is not proved to hold a version."""
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    directory, count = tmp_path / "run", 14
    few = ("trainer.dtype=bfloat16", "engines.dtype=bfloat16", "trainer.optimizer.lr=1e-6", "sync.delta=auto")
    more = (f"run.steps={count}", "trainer.checkpoint_every=0", "engines.hang_timeout_s=12")
    command = start(directory, *SHAPE, *few, *more)
    assert wait_for(partial(trained, directory, 0, WARM + 2), 150), logs(directory)
    others = [pid_of(directory, role) for role in ("controller", "trainer.0", "trainer.1")]
    main = psutil.Process(marked_pids(command.mark, "-m asyncmoe.platform.sglang")[0])
    # Whoever gives itself a title has no mark any more.
    parts = [one.pid for one in main.children(recursive=True) if part and part in " ".join(one.cmdline())]
    last, begin = metrics(directory)[-1]["step"], time.monotonic()
    os.kill(parts[0] if part else main.pid, number)
    assert wait_for(partial(trained, directory, 0, last + 3), 150), logs(directory)
    print(json.dumps({"lost": f"the engine, {part} {number.name}", "seconds_to_three_new_steps": round(time.monotonic() - begin, 2)}))
    assert [pid_of(directory, role) for role in ("controller", "trainer.0", "trainer.1")] == others, "they were left alone"
    assert {step["lineage"] for step in metrics(directory) if step["phase"] == "rl"} == {0}, "no step was trained again"
    assert nccl_settings(directory, command.mark) == {"NCCL_CUMEM_ENABLE": "1"}
    print(json.dumps({"lost": "trainer.1", "seconds_to_a_new_step": round(lose(directory, command, "trainer.1", signal.SIGKILL), 2)}))
    status, out, error = command.finish()
    assert status == 0, error[-3000:] + logs(directory)
    assert command.gone(), command.alive()
    (said,) = [line.partition(": ")[2] for line in out.splitlines() if line.startswith("the trainer starts again, restart 1 of 2 ")]
    assert "a rank was ended by SIGKILL" in said
    check(directory, count)
    updates = [step.get("sync_changed") is None for step in metrics(directory) if step.get("sync_bytes")]
    assert sum(updates) == 3, "the first of each meeting: at the start, with the engine that was started again, of the new trainer"
    assert len(updates) > 6
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["trainer_restarts"], summary["rejected_share"]) == (1, 0.0)
