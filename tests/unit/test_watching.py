"""Heartbeats, what follows from their absence, and alerts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, ConfigError, DataError, Interrupted
from asyncmoe.launch import stacks, watching
from asyncmoe.telemetry import alarm, heartbeats, processes
from asyncmoe.telemetry.alarm import Alarm
from asyncmoe.telemetry.alerts import NO_STEP_S, Alert, Told, tell
from asyncmoe.telemetry.heartbeats import Beat, BeatListener, Heart, Silence
from asyncmoe.telemetry.rollout_schema import Rollout
from asyncmoe.telemetry.schema import Step

ROOT = Path(__file__).parents[2]
HANGS = """
import sys, time
from pathlib import Path
from asyncmoe.telemetry import heartbeats, processes
def hangs_here():
    print(flush=True)
    time.sleep(600)
run_dir = Path(sys.argv[1])
processes.record(run_dir, "trainer.0")
heartbeats.start(run_dir, "trainer.0", 0.1)
heartbeats.beat("a micro-batch")
hangs_here()
"""


def loaded(run_dir: Path, *given: str) -> Config:
    return configuration.load(ROOT / "examples" / "demo.yaml", [f"run.dir={run_dir}", *given])


@contextmanager
def hanging(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A rank that beats once and hangs."""
    with subprocess.Popen([sys.executable, "-c", HANGS, str(run_dir)], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def step(number: int, **more: Any) -> Step:
    return Step(step=number, phase="rl", time=0.0, **more)


# ---------------------------------------------------------------- heartbeats


def test_heartbeats_are_bounded_in_number_and_the_last_is_always_written(tmp_path: Path) -> None:
    now = [100.0]
    heart = Heart(tmp_path, "trainer.0", 2.0, clock=lambda: now[0])
    for _ in range(1000):
        heart.beat("a micro-batch")
        now[0] += 0.01
    heart.beat(heartbeats.ENDED)
    assert heartbeats.read(tmp_path)["trainer.0"] == Beat("trainer.0", os.getpid(), 6, heartbeats.ENDED)
    assert [path.name for path in (tmp_path / heartbeats.FOLDER).iterdir()] == ["trainer.0.json"]


def test_silence_is_measured_with_the_reader_s_clock_and_an_ended_process_is_not_silent() -> None:
    listener, first, second = BeatListener(), Beat("trainer.0", 7, 1, "loads"), Beat("trainer.1", 8, 5, "trains")
    assert listener.hear({"trainer.0": first}, 10.0) == [Silence("trainer.0", 0.0, "loads")]
    assert listener.hear({"trainer.0": first, "trainer.1": second}, 15.0)[0] == Silence("trainer.0", 5.0, "loads")
    ended = Beat("trainer.0", 7, 2, heartbeats.ENDED)
    assert listener.hear({"trainer.0": ended, "trainer.1": second}, 99.0) == [Silence("trainer.1", 84.0, "trains")]


def test_damaged_and_foreign_files_are_no_heartbeats_and_a_disk_that_fails_ends_nothing(tmp_path: Path) -> None:
    Heart(tmp_path, "engine.node 1/ü", 1.0).beat("looks after its server")
    for name, content in (("torn.json", b'{"role": "tr'), ("other.json", b"[1]"), ("x.part", b"")):
        (tmp_path / heartbeats.FOLDER / name).write_bytes(content)
    assert list(heartbeats.read(tmp_path)) == ["engine.node 1/ü"]
    (tmp_path / "file").write_text("")
    Heart(tmp_path / "file", "controller", 1.0).beat("serves requests")  # below a file nothing can be written
    heartbeats.forget(tmp_path)
    assert heartbeats.read(tmp_path) == {}
    heartbeats.forget(tmp_path / "none")


def test_a_process_that_hangs_writes_its_own_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hanging(tmp_path) as process:
        (first, *_) = stacks.stacks(tmp_path)
        assert first.startswith(f"== trainer.0, pid {process.pid}\n")
        assert "in hangs_here" in first
        assert process.poll() is None
        process.send_signal(19)  # SIGSTOP
        monkeypatch.setattr(stacks, "_OWN_S", 0.3)
        assert "as when it is stopped" in next(iter(stacks.stacks(tmp_path)))
        process.send_signal(18)


def test_a_process_that_does_not_say_so_gets_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hanging(tmp_path) as process:
        path = heartbeats.path_of(tmp_path, "trainer.0")
        path.write_bytes(path.read_bytes().replace(b'"dumps":true', b'"dumps":false'))
        (first, *_) = stacks.stacks(tmp_path)
        assert "hangs_here" not in first
        assert process.poll() is None


# ---------------------------------------------------------------- the watcher


def watched(run_dir: Path, seconds: Sequence[float], *given: str, role: str = "", error: Exception | None = None) -> watching.Watcher:
    """Feed a watcher at these times with the heartbeats of the beginning, and then raise the error, if any."""
    config = loaded(run_dir, "watch.beat_s=0.1", "watch.stacks_after_s=5", *given)
    now, said = [0.0], []
    kept = {path: path.read_bytes() for path in (run_dir / heartbeats.FOLDER).glob("*.json")}
    with watching.Watcher(config, clock=lambda: now[0]) as watcher:
        assert heartbeats.read(run_dir) == {}  # those of an earlier start are forgotten
        for path, content in kept.items():
            path.write_bytes(content)
        if role:
            Heart(run_dir, role, 1.0).beat("a micro-batch")
        watcher.say = said.append
        for now[0] in seconds:
            watcher.feed([])
            (run_dir / "said.json").write_text(json.dumps(said))
        if error is not None:
            raise error
    return watcher


def test_a_silent_rank_is_named_with_the_stacks_of_every_process_before_the_run_ends(tmp_path: Path) -> None:
    named = r"^trainer\.0 has been silent for 21 s, since it began: a micro-batch; stacks .*/stacks-.*; then: waited 20 s"
    with hanging(tmp_path), pytest.raises(AsyncmoeError, match=named):
        watched(tmp_path, (0.0, 4.9, 6.0, 10.0, 21.0), "watch.end_after_s=20")
    assert len(json.loads((tmp_path / "said.json").read_text())) == 1  # of one silence once
    (path,) = (tmp_path / "logs").glob("stacks-*.txt")
    assert path.read_text().startswith("trainer.0 has been silent for 6 s, since it began: a micro-batch\n== trainer.0, pid")
    assert "hangs_here" in path.read_text()


def test_lost_engines_and_rollout_workers_are_said_on_the_terminal(tmp_path: Path) -> None:
    said: list[str] = []
    with watching.Watcher(loaded(tmp_path), clock=lambda: 0.0) as watcher:
        watcher.say = said.append
        watcher.feed([Rollout(time=0.0, engines_serving=1)])
        watcher.feed([Rollout(time=1.0, engines_serving=1, engines_lost=1, workers_lost=2, workers_missing=1)])
    assert [text.partition(" lost")[0] for text in said] == ["1 engine(s)", "2 rollout worker(s)"]


def test_files_of_stacks_are_bounded_in_number(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for number in range(30):
        (tmp_path / "logs" / f"stacks-20260101T0000{number:02d}.txt").write_text("old")
    path = watching.write_stacks(tmp_path, [Silence("trainer.0", 9.0, "x")])
    left = sorted((tmp_path / "logs").iterdir())
    assert (len(left), left[-1]) == (20, path)
    assert "asyncmoe stacks: got" in path.read_text()  # there is no process to show


def test_another_failure_while_a_process_is_silent_names_it_and_keeps_its_exit_code(tmp_path: Path) -> None:
    error = AsyncmoeError("rank 0: gloo timed out")
    error.exit_code = 2
    with pytest.raises(AsyncmoeError, match=r"^trainer\.1 has been silent for 6 s.*; then: rank 0: gloo timed out$") as caught:
        watched(tmp_path, (0.0, 6.0), role="trainer.1", error=error)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("error", [AsyncmoeError("disk full"), Interrupted("stopped at step 3")])
def test_an_error_without_silence_and_a_stop_of_the_user_s_are_left_alone(tmp_path: Path, error: AsyncmoeError) -> None:
    with pytest.raises(type(error)) as caught, watching.Watcher(loaded(tmp_path)):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("remade", [False, True])
def test_a_run_ends_when_its_folder_is_moved(tmp_path: Path, remade: bool) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with watching.Watcher(loaded(run_dir)) as watcher:
        watcher.feed([])
        run_dir.rename(tmp_path / "elsewhere")
        if remade:
            run_dir.mkdir()
        with pytest.raises(DataError, match=r"run: got moved or deleted .*; put it back"):
            watcher.feed([])


def test_a_silent_engine_is_told_but_ends_no_run(tmp_path: Path) -> None:
    watched(tmp_path, (0.0, 60.0), "watch.end_after_s=5", role="engine.0")
    assert "engine.0 has been silent for 60 s" in (tmp_path / "said.json").read_text()


@pytest.mark.parametrize(
    "given",
    [
        "watch.stacks_after_s=1",
        "watch.end_after_s=60",
        "watch.beat_s=.nan",
        "watch.alerts.command=[]",
    ],
)
def test_wrong_keys_are_refused(tmp_path: Path, given: str) -> None:
    with pytest.raises(ConfigError, match=rf"{given.partition('=')[0]}"):
        loaded(tmp_path, given)


# ---------------------------------------------------------------- alerts


def told_of(*batches: Sequence[Step | Rollout], seconds: float = 1.0) -> list[list[str]]:
    told, found = Told(), []
    for number, records in enumerate(batches):
        told, alerts = tell(told, records, number * seconds, 1.0)
        found.append([one.event for one in alerts])
    return found


def test_each_event_is_told_once() -> None:
    broken = step(3, anomalies={"kl_engine": 3.2, "reward": None}, skipped_updates=1)
    assert told_of([step(1)], [step(2)], [broken], [step(4, anomalies={"kl_engine": 4.0})], [step(5)], [broken]) == [
        [],
        [],
        ["anomaly"],
        [],
        [],
        ["anomaly"],
    ]
    assert told_of([], [], [], [], [], [step(1)], [], [], [], [], seconds=NO_STEP_S / 2.5) == [
        [],
        [],
        [],
        ["no_step"],
        [],
        [],
        [],
        [],
        ["no_step"],
        [],
    ]
    lost = [[Rollout(time=0.0, engines_lost=n)] for n in (0, 1, 1, 3, 0, 1)]  # the controller was started again before the fifth
    assert told_of(*lost) == [[], ["engine_lost"], [], ["engine_lost"], [], ["engine_lost"]]
    lost = [[Rollout(time=0.0, workers_lost=n)] for n in (0, 1, 1, 3, 0, 1)]
    assert told_of(*lost) == [[], ["worker_lost"], [], ["worker_lost"], [], ["worker_lost"]]
    assert told_of([Rollout(time=0.0, probe_divergence=1.5, probe_version=7)], [Rollout(time=0.0)]) == [["anomaly"], []]


def sent(command: tuple[str, ...] | None, *alerts: Alert) -> list[str]:
    said: list[str] = []
    sender = Alarm(command, "demo", said.append)
    for one in alerts:
        sender.send(one)
    sender.close()
    return said


def test_a_command_gets_the_alert(tmp_path: Path) -> None:
    assert sent(("tee", str(tmp_path / "got")), Alert("failed", "Plattenfehler – 磁盘", 7)) == []
    got = json.loads((tmp_path / "got").read_bytes())
    assert (got["run"], got["event"], got["text"], got["step"]) == ("demo", "failed", "Plattenfehler – 磁盘", 7)


def test_failing_and_slow_commands_hold_up_nothing_and_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    alerts = [Alert("failed", str(n), n) for n in range(3)]
    (said,) = sent(("sh", "-c", "echo no such room >&2; exit 3"), *alerts)
    assert "watch.alerts.command: status 3: no such room" in said
    assert len(sent(("/no/such/program",), *alerts)) == 1
    monkeypatch.setattr(alarm, "_TIMEOUT_S", 0.3)
    begin = time.monotonic()
    sent(("sleep", "60"), *(alerts * 50))
    assert time.monotonic() - begin < 3.0


def test_processes_of_the_run_are_recorded_under_the_names_that_beat() -> None:
    """`asyncmoe stacks` asks only a process whose recorded role and pid are those of its heartbeat."""
    for source in ("asyncmoe/launch/part.py", "asyncmoe/trainer/__main__.py"):
        text = (ROOT / source).read_text()
        assert text.count("processes.record(") == text.count("heartbeats.start(")
    assert processes.FOLDER != heartbeats.FOLDER
