"""Trainer and engines that use the same devices in turn, on whole runs."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from asyncmoe import checkpoints
from asyncmoe.checkpoints import intact
from asyncmoe.occupancy import DeviceTurn
from asyncmoe.telemetry import processes
from tests.system import trained_once
from tests.system.runs import AGREES, Command, further, json_lines, logs, metrics, run, start, wait_for
from tests.system.trained_once import WARM, process

pytestmark = pytest.mark.system
COLOCATED = ("placement=colocated", "queue.staleness.max_staleness=0", "sync.verify_every=1", AGREES)
ENDURING = ("trainer.max_restarts=9", "engines.restarts=9", "run.controller_restarts=9", "trainer.checkpoint_every=2")
PARTS = ("trainer_out", "engines_in", "update", "engines_drain", "engines_out", "trainer_in")
QUICK = ("trainer.timeout_s=10", "sync.timeout_s=5", "engines.hang_timeout_s=12", "watch.beat_s=1", "watch.stacks_after_s=5")
QUICK += ("watch.end_after_s=15",)
"""To see soon that a process hangs."""
LOADED = ("environment.kind=tests.system.pausing:Pausing", "environment.max_turns=2", "rollout.max_new_tokens=32")
LOADED += ("engines.max_running=256", "evaluation.every=1", "evaluation.prompts=64", "evaluation.max_concurrent=64")
SCHEDULER, SERVER = ("engine.0", "sglang::scheduler"), ("engine.0", "asyncmoe.platform.sglang")
RANK, AGENT, CONTROLLER = ("trainer.1", ""), ("engine.0", ""), ("controller", "")
ASKED = "asking the trainer to save and stop"
FAULTS = [("killed", *one) for one in (RANK, AGENT, CONTROLLER)] + [("out of memory", *one) for one in (RANK, SCHEDULER)]
FAULTS += [(how, *one) for how in ("paused", "stopped") for one in (RANK, SCHEDULER, SERVER, CONTROLLER)]


def turns(directory: Path) -> list[str]:
    """The states that the controller has passed to, of all its starts."""
    return re.findall(r"devices in turn: \w+, so (\w+)", (directory / "logs" / "controller.log").read_text())


def begin(directory: Path, *more: str) -> Command:
    """A colocated run that has trained on what it sampled, also if it is resumed."""
    before = len(metrics(directory)) or WARM
    shape = [one for one in trained_once.SHAPE if not one.startswith("run.steps")]
    command = start(directory, *COLOCATED, *ENDURING, *shape, *more)
    assert wait_for(lambda: len(metrics(directory)) > before + 1, 150), logs(directory)
    return command


def runs(directory: Path, role: str, part: str = "") -> bool:
    with suppress(AssertionError, StopIteration, psutil.NoSuchProcess):
        return process(directory, role, part).is_running()
    return False


def reach(directory: Path, state: DeviceTurn, role: str, part: str = "") -> None:
    """Wait until the process runs and the controller passes to a state."""
    assert wait_for(lambda: runs(directory, role, part), 120), state
    before = len(turns(directory))
    assert wait_for(lambda: state in turns(directory)[before:], 120, 0.002), (state, turns(directory)[before:])


def test_engines_and_trainer_take_turns(tmp_path: Path) -> None:
    run(tmp_path / "run", *COLOCATED, "run.steps=4", "engines.tp=2", "trainer.tp=2")
    taken = turns(tmp_path / "run")
    cycle = [DeviceTurn.WAKING, DeviceTurn.GENERATING, DeviceTurn.DRAINING, DeviceTurn.ASLEEP, DeviceTurn.TRAINING]
    assert taken == [*cycle[2:], *cycle * 4]
    steps = [one for one in metrics(tmp_path / "run") if one["phase"] == "rl"]
    assert all(one["staleness_max"] == 0 and min(one["switch_seconds"][part] for part in PARTS) > 0 for one in steps)
    assert all(one["step_seconds"] > sum(one["switch_seconds"].values()) for one in steps[1:])


@contextmanager
def lost(one: psutil.Process, how: str) -> Iterator[None]:
    """Within the block a process is lost, or stopped for a moment."""
    if how != "out of memory":
        (one.kill if how == "killed" else one.suspend)()
        time.sleep(3.0 * (how == "paused"))
        one.resume() if how == "paused" else None
        return (yield)
    root, own = Path("/sys/fs/cgroup"), "".join(re.findall(r":memory:/(.*)", Path("/proc/self/cgroup").read_text()))
    below, limit, count = root / "memory" / own, "memory.limit_in_bytes", "memory.oom_control"
    if (root / "cgroup.controllers").exists():  # the second version
        below, limit, count = root, "memory.max", "memory.events"
    group = below / f"asyncmoe-test-{one.pid}"
    try:
        group.mkdir()
        (group / limit).write_text("4M")  # what it has is charged where it was
        (group / "cgroup.procs").write_text(str(one.pid))
    except OSError as error:
        pytest.skip(f"no limit on memory can be set here: {error}")
    assert wait_for(lambda: "\noom_kill 1\n" in (group / count).read_text(), 60), "the kernel says that it has killed it"
    yield
    assert wait_for(lambda: not subprocess.run(["rmdir", group], check=False, capture_output=True).returncode, 60), "it has been reaped"


@pytest.mark.thorough
@pytest.mark.parametrize(("how", "role", "part"), FAULTS)
def test_a_process_lost_or_stopped_in_any_state_costs_nothing(tmp_path: Path, how: str, role: str, part: str) -> None:
    directory, steps = tmp_path / "run", 60 if how == "paused" else 150
    command = begin(directory, f"run.steps={steps}", *(QUICK if how == "stopped" else ()))
    for state in DeviceTurn:
        reach(directory, state, role, part)
        one, last = process(directory, role, part), metrics(directory)[-1]["step"]
        started = processes.started(one.pid)
        with lost(one, how):
            assert wait_for(partial(trained_once.trained, directory, 0, last + 1), 150), (state, logs(directory))
        if how == "paused":
            assert processes.started(one.pid) == started, state
        else:
            assert wait_for(lambda: processes.started(one.pid) != started, 60), state  # noqa: B023
    out, error = command.succeed(300.0, directory)
    trained_once.exact(directory, steps)
    assert how != "paused" or [one["step"] for one in metrics(directory)] == [*range(1, WARM + steps + 1)]
    said = "".join((out, error, *(path.read_text() for path in (directory / "logs").glob("*.log"))))
    causes = {"stopped": f"{role} (has been silent|is fenced)", "out of memory": "as when memory runs out|crashed with exit code -9"}
    assert re.search(causes.get(how, ""), said)


@pytest.mark.thorough
def test_a_stop_asked_for_in_any_state_saves_and_the_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Also while no engine is left that could take the weights. The oracle is a replay in one go."""
    directory, steps = tmp_path / "run", 60
    shape = (f"run.steps={steps}", "trainer.checkpoint_every=0", "trainer.keep_checkpoints=99", "log.keep=all")
    for state in (*DeviceTurn, None):
        command = begin(directory, *shape)
        reach(directory, state or DeviceTurn.TRAINING, "trainer.0")
        rank, log = process(directory, "trainer.0"), directory / "logs" / "controller.log"
        if state is None:
            rank.suspend()
        before = log.read_text().count(ASKED)
        command.process.send_signal(signal.SIGINT)
        if state is None:
            assert wait_for(lambda: log.read_text().count(ASKED) > before, 30)  # noqa: B023
            process(directory, *SERVER).kill()
            rank.resume()
        status, _, said = command.finish(90)
        assert (status, command.gone()) == (130, True), said
        assert ", which is saved; the same command resumes from" in said
        newest = checkpoints.newest(directory)
        assert newest == checkpoints.directory(directory, metrics(directory)[-1]["step"])
        assert intact.fault(newest) is None
    begin(directory, *shape).succeed(300.0, directory)
    assert [one["step"] for one in metrics(directory)] == [*range(1, WARM + steps + 1)]
    trained_once.exact(directory, steps)
    out, _ = Command("replay", str(directory)).succeed(600.0)
    assert f"steps {WARM + 1} to {WARM + steps}: bit-equal" in out


@pytest.mark.thorough
def test_requests_in_flight_at_a_switch_go_on_and_nothing_hangs(tmp_path: Path) -> None:
    """Those of an evaluation, with the next version; those of a lost trainer's batch, with the same: no token that is trained is stale."""
    directory, steps = tmp_path / "run", 12
    command = begin(directory, f"run.steps={steps}", *LOADED)
    for _ in range(2):
        reach(directory, DeviceTurn.GENERATING, "trainer.1")
        process(directory, "trainer.1").kill()
        assert wait_for(further(directory, 1), 150), logs(directory)
    command.succeed(300.0, directory)
    trained_once.exact(directory, steps)
    assert json_lines(directory / "rollout.jsonl")[-1]["recomputed_tokens"] > 0
    assert any(one["version_min"] < one["version_max"] for one in json_lines(directory / "evaluation.jsonl"))
    assert all(one["staleness_max"] == 0 for one in metrics(directory) if one["phase"] == "rl")
