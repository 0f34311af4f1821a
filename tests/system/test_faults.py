"""Whole runs in which an engine dies or hangs: the run goes on, and the engine is replaced."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from asyncmoe.telemetry.records import read_spans
from asyncmoe.telemetry.schema import CONTROLLER_SPANS
from tests.system.runs import MARK, Command, metrics, start, wait_for

pytestmark = [pytest.mark.system, pytest.mark.thorough]
STEPS = 400


def server(command: Command) -> psutil.Process:
    """The process of engine.0, which has the run's own seed, 0."""
    for process in psutil.process_iter():
        try:
            words = process.cmdline() if command.mark == process.environ().get(MARK) else []
        except psutil.Error:
            continue
        if ["--random-seed", "0"] in [words[at : at + 2] for at in range(len(words))]:
            return process
    raise AssertionError("engine.0 does not run")


@pytest.mark.parametrize("how", ["killed", "hung"])
def test_an_engine_that_is_lost_is_replaced_and_the_run_goes_on(tmp_path: Path, how: str) -> None:
    directory = tmp_path / "run"
    two = ("engines.count=2", f"run.steps={STEPS}", "engines.hang_timeout_s=12", "rollout.request_timeout_s=120")
    command = start(directory, *two)
    controller = directory / "logs" / "controller.log"

    def said(text: str) -> bool:
        return controller.exists() and text in controller.read_text()

    try:
        assert wait_for(lambda: any(s["phase"] == "rl" for s in metrics(directory)), 240)
        lost = server(command)
        if how == "killed":
            lost.kill()
        else:
            (scheduler,) = [one for one in lost.children(recursive=True) if "sglang::scheduler" in " ".join(one.cmdline())]
            scheduler.send_signal(signal.SIGSTOP)
        begin, steps = time.monotonic(), len(metrics(directory))
        assert wait_for(lambda: said("engine.0 is fenced"), 60)
        fenced_after = time.monotonic() - begin
        assert fenced_after < (10 if how == "killed" else 2 * 12)
        assert wait_for(lambda: len(metrics(directory)) > steps + 2, 60), "the other engine feeds the run"
        assert wait_for(lambda: said("engine.0 has started again"), 180)
        again = time.time()
        spans = directory / CONTROLLER_SPANS
        assert wait_for(lambda: any(one.who == "engine.0" and one.begin > again for one in read_spans(spans)), 120)
    finally:
        command.process.send_signal(signal.SIGINT)
        status, _, error = command.finish(120)
    assert "resumes from" in error or status == 0
    assert command.gone(), command.alive()
