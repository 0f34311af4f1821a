"""Processes of a run are lost one after the other: each restarts alone, the others continue, and everything is trained once.

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

from asyncmoe.telemetry import processes
from tests.system.runs import Command, logs, marked_pids, metrics, nccl_settings, provide, start, wait_for
from tests.system.trained_once import SHAPE, WARM, check, process, trained

pytestmark = pytest.mark.system
STEPS = 60
"""Of some tenths of a second: many more than this process needs to see two of them after each loss, and to end the supervisor."""
ALONE = {"trainer": ("controller", "engine", "rollout"), "controller": ("engine",), "engine": ("controller", "trainer", "rollout")}
ALONE["rollout"] = ("controller", "trainer", "engine")
"""Which other processes go on when one is lost."""
ROLES = ("controller", "trainer.0", "trainer.1", "engine.0", "rollout.1", "rollout.2")
KILL, HANG, FAULT = signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV
QUICK = ("trainer.timeout_s=60", "watch.beat_s=1", "watch.stacks_after_s=8", "watch.end_after_s=40", "engines.hang_timeout_s=12")
"""To see that a process hangs. The trainer may wait 30 s for a worker until the controller takes that for lost."""


def runs_anew(directory: Path, role: str, before: int) -> bool:
    """Return whether a process has replaced a lost one."""
    return any(one.role == role and one.pid != before and processes.runs(one) for one in processes.read(directory))


def lose(directory: Path, role: str, part: str, number: signal.Signals) -> None:
    """Send a process a signal just after a step, when its version goes to the engine, and wait for two more steps."""
    last = metrics(directory)[-1]["step"]
    assert wait_for(partial(trained, directory, 0, last + 1), 60, 0.01), logs(directory)
    others = [one for one in ROLES if one != role and one.partition(".")[0] in ALONE[role.partition(".")[0]]]
    before = [process(directory, one) for one in others]
    lost, lines, last, begin = process(directory, role, part), len(metrics(directory)), metrics(directory)[-1]["step"], time.monotonic()
    lost.send_signal(number)
    assert wait_for(partial(trained, directory, lines, last + 2), 150), logs(directory)
    print(json.dumps({"lost": f"{role} {part}", "by": number.name, "two_steps_s": round(time.monotonic() - begin, 2)}))
    assert [process(directory, one) for one in others] == before, "they were left alone"
    assert part or wait_for(partial(runs_anew, directory, role, lost.pid), 60), f"{role} does not come again"


@pytest.mark.parametrize(
    ("losses", "more"),
    [
        ([("trainer.1", "", KILL), ("controller", "", KILL), ("engine.0", "", KILL), ("rollout.1", "", KILL)], ()),
        pytest.param(
            [("trainer.1", "", HANG), ("controller", "", HANG), ("engine.0", "sglang::scheduler", HANG), ("rollout.1", "", HANG)],
            QUICK,
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            [("trainer.0", "", FAULT), ("controller", "", FAULT), ("engine.0", "sglang::detokenizer", KILL)],
            QUICK,
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["killed", "hung", "otherwise"],
)
def test_a_run_outlives_each_of_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: list[tuple[str, str, signal.Signals]], more: tuple[str, ...]
) -> None:
    """In the end its supervisor is killed, which leaves nothing, and the same command resumes it. Every version is checked in the engine;
    updates are deltas, in bfloat16: at a small learning rate few of the bits that are stored change in a step. The next engine has the
    settings of NCCL of the first."""
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    directory = tmp_path / "run"
    deltas = ("trainer.dtype=bfloat16", "engines.dtype=bfloat16", "trainer.optimizer.lr=1e-6", "sync.delta=auto", "sync.verify_every=1")
    shape = (*SHAPE, f"run.steps={STEPS}", "trainer.checkpoint_every=8", "rollout.workers=2", *deltas, *more)
    command = start(directory, *shape)
    assert wait_for(partial(trained, directory, 0, WARM + 1), 150), logs(directory)
    for role, part, number in losses:
        lose(directory, role, part, number)
    assert nccl_settings(directory, command.mark) == {"NCCL_CUMEM_ENABLE": "1"}
    command.process.kill()
    command.process.wait()
    assert metrics(directory)[-1]["step"] < WARM + STEPS, "the run was over before its supervisor was lost"
    start(directory, *shape).succeed(directory=directory)
    assert command.gone(), command.alive()
    out, _ = command.process.communicate()
    for what in ("trainer", "controller"):
        assert out.count(f"the {what} starts again, restart 1 of 2 ") == sum(role.startswith(what) for role, _, _ in losses), out
    assert (directory / "logs" / "controller.log").read_text().count("engine.0 is taken over and serves version") == 1
    check(directory, STEPS)
    updates = [step for step in metrics(directory) if step.get("sync_bytes")]
    sent = [step for step in updates if step["sync_changed"] is not None]
    whole = max(step["sync_bytes"] for step in updates)
    assert len(sent) > STEPS / 3
    assert all(step["sync_changed"] < 0.1 and step["sync_bytes"] < whole / 4 for step in sent)


@pytest.mark.thorough
def test_what_is_left_of_a_lost_supervisor_ends_in_time(tmp_path: Path) -> None:
    """Also after the controller hung."""
    directory = tmp_path / "run"
    command = start(directory, *SHAPE, "engines.orphan_s=5", "run.controller_restarts=0", "cluster.heartbeat_timeout_s=3")
    assert wait_for(partial(trained, directory, 0, WARM + 1), 150), logs(directory)
    process(directory, "controller").suspend()
    command.process.kill()
    assert wait_for(lambda: not marked_pids(command.mark, "sglang"), 5.0 + 20.0), command.alive()
    command.finish()
    for pid in marked_pids(command.mark, "asyncmoe rollout"):
        os.kill(pid, KILL)
    assert command.gone(), command.alive()


def test_a_worker_without_a_controller_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    command = Command("worker", "examples/demo.yaml", f"run.dir={tmp_path / 'run'}", f"model.path={provide(tmp_path / 'model')}")
    worker = psutil.Process(command.process.pid)

    def waits() -> bool:
        before = sum(worker.cpu_times()[:2])
        time.sleep(1.0)
        return 1.0 < before > sum(worker.cpu_times()[:2]) - 0.02

    assert wait_for(waits, 120)
    command.process.terminate()
    assert command.gone(20.0), command.alive()
