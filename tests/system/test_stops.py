"""Ctrl-C in every phase of a run: it says in one line what is saved, leaves nothing running, and the same command resumes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from asyncmoe import checkpoints
from asyncmoe.checkpoints import intact
from tests.system.runs import ONE_RANK, Command, json_lines, logs, metrics, run, silent_engines, start, wait_for

pytestmark = pytest.mark.system
PHASES = ("the controller starts", "the trainer has joined", "the first warm-up step", "the last step")


def stopped(command: Command) -> str:
    """Press Ctrl-C as a terminal does, and return what the command says when it has ended."""
    os.kill(command.process.pid, signal.SIGINT)
    status, _, error = command.finish(90)
    assert status == 130, error
    assert "Traceback" not in error
    assert command.gone(), command.alive()
    return error


@pytest.mark.parametrize("when", ["engines start", *(pytest.param(phase, marks=pytest.mark.thorough) for phase in PHASES)])
def test_ctrl_c_in_every_phase_says_what_is_saved(tmp_path: Path, when: str) -> None:
    """While engines start, the trainer publishes the warm-up's weights to engines that do not come, as long as engines.start_timeout_s."""
    directory = tmp_path / "run"
    waits = {"engines start": 2, "the trainer has joined": 0}
    slow = (f"warmup.steps={waits[when]}", silent_engines(tmp_path), "engines.start_timeout_s=600") if when in waits else ()
    command = start(directory, *slow)
    come = {
        "the controller starts": lambda: (directory / "logs" / "controller.log").exists(),
        "the trainer has joined": lambda: any("resumed_at" in line for line in json_lines(directory / "metrics.jsonl")),
        "the first warm-up step": lambda: len(metrics(directory)) >= 1,
        "engines start": lambda: len(metrics(directory)) == 2,
        "the last step": lambda: len(metrics(directory)) == 7,
    }[when]
    assert wait_for(come, 120, 0.02), logs(directory)
    said = stopped(command)
    newest = checkpoints.newest(directory)
    if newest is None:
        assert when != "engines start"
        assert "stopped before the first step; the same command starts over" in said
    else:
        assert f"; the same command resumes from {newest}" in said or when == "the last step", said
        assert str(newest) in said
        assert newest == checkpoints.directory(directory, metrics(directory)[-1]["step"])


def test_ctrl_c_waits_for_a_checkpoint_that_is_written_while_training_goes_on_and_the_run_resumes_from_it(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    saving = (*ONE_RANK, "trainer.async_save=true", "trainer.checkpoint_every=1")
    command = start(directory, "run.steps=200", *saving)
    assert wait_for(lambda: any(s["phase"] == "rl" for s in metrics(directory)), 120), command.process.poll()
    said = stopped(command)
    assert "in use" not in said
    assert ", which is saved; the same command resumes from" in said
    last = metrics(directory)[-1]["step"]
    newest = checkpoints.newest(directory)
    assert newest == checkpoints.directory(directory, last)
    assert intact.fault(newest) is None
    assert not list(newest.parent.glob("*.writing"))
    stood = [s["checkpoint_s"] for s in metrics(directory) if s.get("checkpoint_s") is not None]
    assert len(stood) >= last - 2, "a save after each step but the last"
    again = len(json_lines(directory / "rollout.jsonl"))
    summary = run(directory, f"run.steps={last - 4 + 2}", *saving)
    records = json_lines(directory / "rollout.jsonl")
    assert records[again]["started"] >= records[again - 1]["started"], "the ledger goes on"
    assert summary["steps"] == last - 4 + 2
    assert [s["step"] for s in metrics(directory)][-3:] == [last, last + 1, last + 2]
    assert checkpoints.newest(directory) == checkpoints.directory(directory, last + 2)


@pytest.mark.thorough
@pytest.mark.parametrize("seconds", [0.3, 0.6, 1.0, 1.5, 2.5, 4.0, 6.0])
def test_ctrl_c_soon_after_the_start_is_one_line(tmp_path: Path, seconds: float) -> None:
    command = start(tmp_path / "run", "model.make.layers=2")
    time.sleep(seconds)
    used = psutil.Process(command.process.pid).cpu_times
    assert wait_for(lambda: used().user + used().system > 0.2, 30, 0.02), "Python itself, which starts in half of that, prints a traceback"
    assert stopped(command).splitlines()[-1].startswith("stopped before the ")
