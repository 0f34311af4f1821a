"""Trainer and engines that use the same devices in turn, on whole runs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from asyncmoe import checkpoints
from asyncmoe.checkpoints import intact
from asyncmoe.occupancy import DeviceTurn
from asyncmoe.telemetry import processes
from tests.system import trained_once
from tests.system.runs import AGREES, Command, json_lines, logs, metrics, run, start, wait_for
from tests.system.test_stops import stopped
from tests.system.trained_once import WARM, process

pytestmark = pytest.mark.system
COLOCATED = ("placement=colocated", "queue.staleness.max_staleness=0", "sync.verify_every=1", AGREES)
ENDURING = ("trainer.max_restarts=9", "engines.restarts=9", "run.controller_restarts=9", "trainer.checkpoint_every=2")
QUICK = ("trainer.timeout_s=10", "sync.timeout_s=5", "engines.hang_timeout_s=12", "watch.beat_s=1", "watch.stacks_after_s=5")
"""To see that a process hangs."""
LOADED = ("environment.kind=tests.system.pausing:Pausing", "environment.max_turns=2", "rollout.max_new_tokens=32")
LOADED += ("engines.max_running=256", "evaluation.every=1", "evaluation.prompts=64", "evaluation.max_concurrent=64")
SCHEDULER, SERVER = "sglang::scheduler", "asyncmoe.platform.sglang"
ROLES = (("trainer.1", ""), ("engine.0", ""), ("controller", ""))
PARTS = (("trainer.1", ""), ("engine.0", SCHEDULER), ("engine.0", SERVER), ("controller", ""))


def turns(directory: Path) -> list[str]:
    """The states that the controller has passed to, of all its starts."""
    return re.findall(r"devices in turn: \w+, so (\w+)", (directory / "logs" / "controller.log").read_text())


def begin(directory: Path, *more: str) -> Command:
    """A colocated run that has begun to sample; more steps than any test needs."""
    shape = [one for one in trained_once.SHAPE if not one.startswith("run.steps")]
    command = start(directory, *COLOCATED, *ENDURING, *shape, *more)
    assert wait_for(lambda: len(metrics(directory)) > WARM + 1, 150), logs(directory)
    return command


def reach(directory: Path, role: str, state: DeviceTurn) -> None:
    """Wait until the process runs and the controller passes to a state."""
    assert wait_for(lambda: any(one.role == role and processes.runs(one) for one in processes.read(directory)), 90), state
    before = len(turns(directory))
    assert wait_for(lambda: state in turns(directory)[before:], 120, 0.002), (state, turns(directory)[before:])


def goes_on(directory: Path, state: DeviceTurn, seconds: float = 150.0) -> None:
    """Wait for a step that none before has reached."""
    last = metrics(directory)[-1]["step"]
    assert wait_for(partial(trained_once.trained, directory, 0, last + 1), seconds), (state, logs(directory))


def test_engines_and_trainer_take_turns(tmp_path: Path) -> None:
    run(tmp_path / "run", *COLOCATED, "run.steps=4", "engines.tp=2", "trainer.tp=2")
    taken = turns(tmp_path / "run")
    cycle = [DeviceTurn.WAKING, DeviceTurn.GENERATING, DeviceTurn.DRAINING, DeviceTurn.ASLEEP, DeviceTurn.TRAINING]
    assert taken == [*cycle[2:], *cycle * 4]
    assert all(one["staleness_max"] == 0 for one in metrics(tmp_path / "run") if one["phase"] == "rl")


@pytest.mark.thorough
@pytest.mark.parametrize(("role", "part"), ROLES)
def test_a_process_lost_in_any_state_costs_nothing(tmp_path: Path, role: str, part: str) -> None:
    directory, steps = tmp_path / "run", 150
    command = begin(directory, f"run.steps={steps}")
    for state in DeviceTurn:
        reach(directory, role, state)
        process(directory, role).kill()
        goes_on(directory, state)
    command.succeed(300.0, directory)
    trained_once.exact(directory, steps)
    assert {one["step"] for one in metrics(directory)} == {*range(1, WARM + steps + 1)}


@pytest.mark.thorough
@pytest.mark.parametrize(("role", "part"), PARTS)
def test_a_process_stopped_for_a_moment_in_any_state_is_waited_for(tmp_path: Path, role: str, part: str) -> None:
    directory, steps = tmp_path / "run", 40
    command = begin(directory, f"run.steps={steps}", "engines.hang_timeout_s=30")
    first = processes.read(directory)
    for state in DeviceTurn:
        reach(directory, role, state)
        one = process(directory, role, part)
        one.suspend()
        time.sleep(3.0)
        one.resume()
        goes_on(directory, state)
    command.succeed(300.0, directory)
    assert processes.read(directory) == first
    trained_once.exact(directory, steps)
    assert [one["step"] for one in metrics(directory)] == [*range(1, WARM + steps + 1)]


@pytest.mark.thorough
@pytest.mark.parametrize(("role", "part"), PARTS)
def test_a_process_stopped_for_good_in_any_state_is_killed_and_replaced(tmp_path: Path, role: str, part: str) -> None:
    directory, steps = tmp_path / "run", 150
    command = begin(directory, f"run.steps={steps}", "watch.end_after_s=15", *QUICK)
    for state in os.environ.get("STATES", "").split() or DeviceTurn:
        state = DeviceTurn(state)
        reach(directory, role, state)
        one = process(directory, role, part)
        one.suspend()
        begun = time.monotonic()
        goes_on(directory, state)
        print(role, part, state, round(time.monotonic() - begun, 1), flush=True)
        assert not one.is_running(), state
    command.succeed(300.0, directory)
    trained_once.exact(directory, steps)


@contextmanager
def memory_group() -> Iterator[Path]:
    """A cgroup whose processes are killed when they take more than 4 MB; what they have is charged where they were."""
    new, (own, *_) = Path("/sys/fs/cgroup"), [*re.findall(r":memory:/(.*)", Path("/proc/self/cgroup").read_text()), ""]
    group, limit = (new, "memory.max") if (new / "cgroup.controllers").exists() else (new / "memory" / own, "memory.limit_in_bytes")
    group /= f"asyncmoe-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text("4M")
    except OSError as error:
        pytest.skip(f"no limit on memory can be set here: {error}")
    yield group
    group.rmdir()


def killed(group: Path) -> int:
    """How many processes the kernel has killed, as the group's memory had run out."""
    counts = [group / name for name in ("memory.events", "memory.oom_control") if (group / name).exists()]
    return int(re.findall(r"^oom_kill (\d+)", counts[0].read_text(), re.MULTILINE)[0])


@pytest.mark.thorough
@pytest.mark.parametrize(("role", "part"), [("trainer.1", ""), ("engine.0", SCHEDULER)])
def test_a_process_killed_for_lack_of_memory_in_any_state_costs_nothing(tmp_path: Path, role: str, part: str) -> None:
    directory, steps = tmp_path / "run", 150
    command = begin(directory, f"run.steps={steps}")
    for state in os.environ.get("STATES", "").split() or DeviceTurn:
        state = DeviceTurn(state)
        with memory_group() as group:
            reach(directory, role, state)
            (group / "cgroup.procs").write_text(str(process(directory, role, part).pid))
            assert wait_for(lambda: killed(group) > 0, 60), state
            begun = time.monotonic()
            goes_on(directory, state)
            print(role, part, state, round(time.monotonic() - begun, 1), flush=True)
    out, _ = command.succeed(300.0, directory)
    told = out if role == "trainer.1" else (directory / "logs" / "controller.log").read_text()
    print(told)
    assert told.count("as when memory runs out") >= len(DeviceTurn)
    trained_once.exact(directory, steps)


@pytest.mark.thorough
def test_a_stop_asked_for_in_any_state_saves_and_the_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Also while no engine is left that could take the weights. The oracle is a replay in one go."""
    directory, steps = tmp_path / "run", 60
    shape = (f"run.steps={steps}", "trainer.checkpoint_every=0", "trainer.keep_checkpoints=99", "log.keep=all")
    for state in (*DeviceTurn, None):
        command = begin(directory, *shape)
        reach(directory, "trainer.0", state or DeviceTurn.TRAINING)
        if state is None:
            process(directory, "engine.0", SERVER).kill()
        begun = time.monotonic()
        said = stopped(command)
        print(state, round(time.monotonic() - begun, 1), said, flush=True)
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
        reach(directory, "trainer.1", DeviceTurn.GENERATING)
        process(directory, "trainer.1").kill()
        goes_on(directory, DeviceTurn.GENERATING)
    command.succeed(300.0, directory)
    trained_once.exact(directory, steps)
    assert json_lines(directory / "rollout.jsonl")[-1]["recomputed_tokens"] > 0
    assert any(one["version_min"] < one["version_max"] for one in json_lines(directory / "evaluation.jsonl"))
    assert all(one["staleness_max"] == 0 for one in metrics(directory) if one["phase"] == "rl")
