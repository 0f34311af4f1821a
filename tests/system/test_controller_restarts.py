"""A controller that is lost starts again with the trainer, while the engine waits and is taken over; everything is trained once. A
supervisor that is lost leaves nothing, and the same command resumes the run.

`pytest -s` shows the times.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.system.runs import ONE_RANK, Command, logs, marked_pids, metrics, nccl_settings, start, wait_for
from tests.system.test_log import SHAPE, WARM, check, trained
from tests.system.test_restarts import ENGINE, pid_of

pytestmark = pytest.mark.system


def generates(directory: Path, since: float) -> bool:
    """Whether a controller has recorded episodes under way after a moment, Unix seconds."""
    lines = [json.loads(line) for line in (directory / "rollout.jsonl").read_text().splitlines() if line.endswith("}")]
    return any(one["time"] > since and one["running"] > 0 for one in lines[-20:])


def lose(directory: Path, command: Command, role: str, number: signal.Signals) -> dict[str, object]:
    """End the controller, or an engine's `asyncmoe engine`, by a signal, just after a step, when its version goes to the engine; wait for
    two more steps."""
    last = metrics(directory)[-1]["step"]
    assert wait_for(lambda: trained(directory, 0, last + 1), 60, 0.01), logs(directory)
    before, last, servers = pid_of(directory, role), metrics(directory)[-1]["step"], marked_pids(command.mark, ENGINE)
    trainer, begin, at = pid_of(directory, "trainer.0"), time.monotonic(), time.time()
    os.kill(before, number)
    if role == "controller":
        assert wait_for(lambda: generates(directory, at), 90, 0.02), logs(directory)
    serves = time.monotonic() - begin
    assert wait_for(lambda: trained(directory, 0, last + 2), 90), logs(directory)
    assert (marked_pids(command.mark, ENGINE) == servers) is (role == "controller")
    assert (pid_of(directory, "trainer.0") != trainer) is (role == "controller")
    assert pid_of(directory, role) != before
    return {"lost": f"{role}, {number.name}", "generates_s": round(serves, 2), "two_steps_s": round(time.monotonic() - begin, 2)}


def test_a_lost_controller_costs_no_engine_and_a_lost_supervisor_no_sample(tmp_path: Path) -> None:
    """Steps take 0.1 s: there are many more than this process needs to see two of them and to end the supervisor."""
    directory, count = tmp_path / "run", 60
    shape = (*SHAPE, *ONE_RANK, f"run.steps={count}", "trainer.checkpoint_every=8", "cluster.heartbeat_timeout_s=10")
    command = start(directory, *shape)
    assert wait_for(lambda: trained(directory, 0, WARM + 1), 150), logs(directory)
    assert nccl_settings(directory, command.mark) == {"NCCL_CUMEM_ENABLE": "0"}
    print(json.dumps(lose(directory, command, "controller", signal.SIGKILL)))
    print(json.dumps(lose(directory, command, "engine.0", signal.SIGKILL)))
    command.process.kill()
    command.process.wait()
    assert metrics(directory)[-1]["step"] < WARM + count, "the run was over before its supervisor was lost"
    again = start(directory, *shape)
    status, _, error = again.finish()
    assert status == 0, error[-3000:] + logs(directory)
    assert again.gone(), again.alive()
    assert command.gone(), command.alive()
    assert (directory / "logs" / "controller.log").read_text().count("engine.0 is taken over and serves version") == 1
    check(directory, count)


@pytest.mark.thorough
def test_controllers_that_are_killed_or_hang_are_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    command = start(directory, *SHAPE, "run.steps=40", "watch.beat_s=1", "watch.stacks_after_s=8", "watch.end_after_s=10")
    for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP, signal.SIGKILL):
        assert wait_for(lambda: trained(directory, 0, WARM + 1), 150), logs(directory)
        print(json.dumps(lose(directory, command, "controller", number)))
    status, out, _ = command.finish()
    assert status == 0, logs(directory)
    assert command.gone(), command.alive()
    assert out.count("the controller starts again, restart 1 of 2 ") == 4
    check(directory, count=40)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_what_is_left_of_a_lost_supervisor_ends_in_time(tmp_path: Path, number: signal.Signals) -> None:
    """Even if the controller was lost, or hung, before."""
    directory = tmp_path / "run"
    command = start(directory, *SHAPE, "engines.orphan_s=5", "run.controller_restarts=0", "cluster.heartbeat_timeout_s=3")
    assert wait_for(lambda: trained(directory, 0, WARM + 1), 150), logs(directory)
    os.kill(pid_of(directory, "controller"), number)
    command.process.kill()
    assert wait_for(lambda: not marked_pids(command.mark, ENGINE), 5.0 + 20.0), command.alive()
    command.finish()
    for pid in marked_pids(command.mark, "asyncmoe rollout"):
        os.kill(pid, signal.SIGKILL)
    assert command.gone(), command.alive()
