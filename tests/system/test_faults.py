"""Whole runs in which engines die or hang, one way after the other: the run goes on, and each engine is replaced and serves again.

`pytest -s` shows what was measured.
"""

from __future__ import annotations

import getpass
import json
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncmoe.rollout.engines import engine_agent
from asyncmoe.telemetry.records import read_spans
from asyncmoe.telemetry.schema import CONTROLLER_SPANS
from tests.system.runs import MARK, Command, metrics, start, wait_for

pytestmark = [pytest.mark.system, pytest.mark.thorough]
HANG_S = 12.0
Fault = Callable[[psutil.Process], None]


def server(command: Command, index: int) -> psutil.Process:
    """The main process of an engine of the first start."""
    seed = engine_agent._seed(f"engine.{index}", 0)
    for process in psutil.process_iter():
        try:
            words = process.cmdline() if command.mark == process.environ().get(MARK) else []
        except psutil.Error:
            continue
        if ["--random-seed", str(seed)] in [words[at : at + 2] for at in range(len(words))]:
            return process
    raise AssertionError(f"engine.{index} does not run")


def part(main: psutil.Process, title: str) -> psutil.Process:
    (found,) = [one for one in main.children(recursive=True) if title in " ".join(one.cmdline())]
    return found


FAULTS: dict[str, Fault] = {
    "its main process is killed": lambda main: main.kill(),
    "its scheduler is stopped": lambda main: part(main, "sglang::scheduler").send_signal(signal.SIGSTOP),
    "its detokenizer is killed": lambda main: part(main, "sglang::detokenizer").kill(),
    "its main process is stopped": lambda main: main.send_signal(signal.SIGSTOP),
}


def generated(directory: Path) -> tuple[float, int]:
    """Time and tokens of the newest rollout record."""
    newest = json.loads((directory / "rollout.jsonl").read_text().rstrip().splitlines()[-1])
    return newest["time"], newest["generated_tokens"]


def lose(directory: Path, command: Command, index: int, fault: str) -> dict[str, Any]:
    """Lose an engine, and wait until its replacement has served; returns what was measured."""
    log, name, steps = directory / "logs" / "controller.log", f"engine.{index}", len(metrics(directory))
    before = generated(directory)
    time.sleep(15.0)
    at = generated(directory)
    FAULTS[fault](server(command, index))
    begin = time.monotonic()

    def said(text: str) -> int:
        return len(re.findall(rf"{re.escape(name)} {text}", log.read_text()))

    agent = directory / "logs" / f"engine-{index}-joins.log"
    assert wait_for(lambda: said("is fenced") > 0, 60), fault
    fenced = time.monotonic() - begin
    assert wait_for(lambda: "it starts again, restart 1 of 3" in agent.read_text(), 60), fault
    starting, now = time.monotonic(), generated(directory)
    assert wait_for(lambda: len(metrics(directory)) > steps + 2, 60), "the other engine feeds the run"
    assert wait_for(lambda: said("has joined") == 2, 240), fault
    ready, again = time.monotonic() - starting, time.time()
    spans = directory / CONTROLLER_SPANS
    assert wait_for(lambda: any(one.who == name and one.begin > again for one in read_spans(spans)), 120), fault
    rate = (at[1] - before[1]) / (at[0] - before[0])
    meanwhile = (now[1] - at[1]) / (now[0] - at[0])
    return {
        "fault": fault,
        "fenced_s": round(fenced, 1),
        "bound_s": HANG_S,
        "started_again_s": round(ready, 1),
        "served_after_start_s": round(time.monotonic() - starting - ready, 1),
        "tokens_per_s_of_two_engines_before": round(rate, 1),
        "tokens_per_s_of_the_other_until_the_restart": round(meanwhile, 1),
    }


@pytest.mark.parametrize("faults", [tuple(FAULTS)[:2], tuple(FAULTS)[2:]], ids=["first", "second"])
def test_engines_that_are_lost_are_replaced_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: tuple[str, ...]
) -> None:
    directory, temporary = tmp_path / "run", Path(tempfile.mkdtemp())  # the path of a socket below tmp_path is too long
    monkeypatch.setenv("TMPDIR", str(temporary))
    scratch: set[str] = set()
    command = start(directory, "engines.count=2", "run.steps=2000", f"engines.hang_timeout_s={HANG_S}", "rollout.request_timeout_s=120")
    try:
        assert wait_for(lambda: any(s["phase"] == "rl" for s in metrics(directory)), 240)
        for index, fault in enumerate(faults):
            scratch |= {path.name for path in temporary.glob("asyncmoe-*")}
            measured = lose(directory, command, index, fault)
            scratch |= {path.name for path in temporary.glob("asyncmoe-*")}
            print(json.dumps(measured))
            assert measured["fenced_s"] < HANG_S + 5.0
    finally:
        command.process.send_signal(signal.SIGINT)
        status, _, error = command.finish(120)
    assert "resumes from" in error or status == 0
    assert command.gone(), command.alive()
    assert len(scratch) > 2, "one of each engine and each restart"
    assert {path.name for path in temporary.iterdir()} <= {f"torchinductor_{getpass.getuser()}"}, "a cache, which is kept"
    shutil.rmtree(temporary)
