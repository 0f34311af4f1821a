"""A controller that is lost starts again in place: engine and ranks go on, and everything is trained once. The same command takes over the
engine of a supervisor that is lost.

`pytest -s` shows the times.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from asyncmoe.telemetry import processes
from asyncmoe.telemetry.heartbeats import TRAINER
from tests.system.runs import ONE_RANK, Command, logs, marked, marked_pids, metrics, nccl_settings, start, wait_for
from tests.system.test_log import SHAPE, WARM, check, trained
from tests.system.test_restarts import ENGINE, pid_of

pytestmark = pytest.mark.system


def left_alone(directory: Path, mark: str) -> list[int]:
    """Ids of the processes that go on without a controller: the ranks, the keeper and the engine's."""
    ranks = sorted({one.role for one in processes.read(directory) if one.role.startswith(TRAINER)})
    return [*(pid_of(directory, role) for role in (*ranks, "keeper")), *marked_pids(mark, ENGINE)]


def generates(directory: Path, since: float) -> bool:
    """Whether a controller has recorded episodes under way after a moment, Unix seconds."""
    lines = [json.loads(line) for line in (directory / "rollout.jsonl").read_text().splitlines() if line.endswith("}")]
    return any(one["time"] > since and one["running"] > 0 for one in lines[-20:])


def lose(directory: Path, command: Command, number: signal.Signals) -> dict[str, object]:
    """End the controller by a signal, just after a step, when its version goes to the engine; wait for two more steps."""
    last = metrics(directory)[-1]["step"]
    assert wait_for(lambda: trained(directory, 0, last + 1), 60, 0.01), logs(directory)
    before, last, others = pid_of(directory, "controller"), metrics(directory)[-1]["step"], left_alone(directory, command.mark)
    begin, at = time.monotonic(), time.time()
    os.kill(before, number)
    assert wait_for(lambda: generates(directory, at), 90, 0.02), logs(directory)
    serves = time.monotonic() - begin
    assert wait_for(lambda: trained(directory, 0, last + 2), 60), logs(directory)
    assert left_alone(directory, command.mark) == others
    assert pid_of(directory, "controller") != before
    return {"lost": number.name, "generates_s": round(serves, 2), "two_steps_s": round(time.monotonic() - begin, 2)}


def test_neither_a_controller_nor_a_supervisor_that_is_killed_costs_an_engine_or_a_sample(tmp_path: Path) -> None:
    """Steps take 0.1 s: there are many more than this process needs to see two of them and to end the supervisor."""
    directory, count = tmp_path / "run", 40
    shape = (*SHAPE, *ONE_RANK, f"run.steps={count}", "engines.orphan_s=90", "trainer.checkpoint_every=0")
    command = start(directory, *shape)
    assert wait_for(lambda: trained(directory, 0, WARM + 1), 150), logs(directory)
    assert nccl_settings(directory, command.mark) == {"NCCL_CUMEM_ENABLE": "0"}
    print(json.dumps(lose(directory, command, signal.SIGKILL)))
    said, engine = directory / "logs" / "keeper.log", marked_pids(command.mark, ENGINE)
    command.process.kill()
    command.process.wait()
    assert metrics(directory)[-1]["step"] < WARM + count, "the run was over before its supervisor was lost"
    again = start(directory, *shape)
    status, _, error = again.finish()
    assert status == 0, error[-3000:] + logs(directory)
    assert again.gone(), again.alive()
    assert command.gone(), command.alive()
    assert said.read_text().count("has 1 engine(s)") == 3, "by the second controller, the second command, and its controller"
    assert engine, "it ran"
    assert (directory / "logs" / "controller.log").read_text().count("engine.0 is taken over and serves version") == 2
    check(directory, count)


@pytest.mark.thorough
def test_controllers_that_are_killed_or_hang_are_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    command = start(directory, *SHAPE, "run.steps=40", "watch.beat_s=1", "watch.stacks_after_s=8", "watch.end_after_s=10")
    for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP, signal.SIGKILL):
        assert wait_for(lambda: trained(directory, 0, WARM + 1), 150), logs(directory)
        print(json.dumps(lose(directory, command, number)))
    os.kill(pid_of(directory, "trainer.1"), signal.SIGKILL)  # so that every step is trained again, and its loss compared
    status, out, _ = command.finish()
    assert status == 0, logs(directory)
    assert command.gone(), command.alive()
    assert out.count("the controller starts again, restart 1 of 2 ") == 4
    check(directory, count=40)


@pytest.mark.thorough
def test_engines_that_nobody_takes_over_end_in_time(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    command = start(directory, *SHAPE, "engines.orphan_s=5")
    assert wait_for(lambda: trained(directory, 0, WARM + 1), 150), logs(directory)
    assert any(ENGINE in line for line in marked(command.mark))
    command.process.kill()
    assert wait_for(lambda: not any(processes.runs(one) for one in processes.read(directory) if one.role == "controller"), 20)
    assert command.gone(5.0 + 5.0), command.alive()
    assert not (directory / "keeper.json").exists()
