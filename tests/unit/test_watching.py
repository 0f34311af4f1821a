"""Heartbeats, the consequences of their absence, alerts, and the stacks of recorded processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, DataError, UserError
from asyncmoe.launch import stacks, watching
from asyncmoe.telemetry import alerts, heartbeats, processes
from asyncmoe.telemetry.alerts import NO_STEP_S, Alarm, Alert, Told, tell
from asyncmoe.telemetry.heartbeats import Beat, BeatListener, Heart, Silence
from asyncmoe.telemetry.rollout_schema import Rollout
from asyncmoe.telemetry.schema import Step
from tests.configs import demo

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
    return demo(f"run.dir={run_dir}", *given)


@contextmanager
def hanging(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A rank that beats once and hangs."""
    with subprocess.Popen([sys.executable, "-c", HANGS, str(run_dir)], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def step(number: int, **more: Any) -> Step:
    return Step(step=number, phase="rl", time=0.0, **more)


# ---------------------------------------------------------------- heartbeats


def test_heartbeats_are_bounded_in_number_and_the_last_is_always_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(heartbeats, "time", SimpleNamespace(monotonic=lambda: now[0]))
    heart = Heart(tmp_path, "trainer.0", 2.0)
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


def test_only_a_process_that_says_so_is_signalled_to_write_its_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hanging(tmp_path) as process:
        (first, *_) = stacks.stacks(tmp_path)
        assert first.startswith(f"== trainer.0, pid {process.pid}\n")
        assert "in hangs_here" in first
        assert process.poll() is None
        process.send_signal(19)  # SIGSTOP
        monkeypatch.setattr(stacks, "_OWN_S", 0.3)
        assert "as when it is stopped" in next(iter(stacks.stacks(tmp_path)))
        process.send_signal(18)
        path = heartbeats.path_of(tmp_path, "trainer.0")
        path.write_bytes(path.read_bytes().replace(b'"dumps":true', b'"dumps":false'))
        (first, *_) = stacks.stacks(tmp_path)
        assert "hangs_here" not in first.partition("\n")[2].partition("\n")[2]
        assert process.poll() is None


# ---------------------------------------------------------------- the watcher


def watched(run_dir: Path, seconds: Sequence[float], *given: str, role: str = "", error: Exception | None = None) -> None:
    """Feed a watcher at these times with the heartbeats of the beginning, and then raise the error, if any, or that a part hangs."""
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
            if watcher.hanging:
                raise AsyncmoeError(f"the {watcher.hanging} hangs")
        if error is not None:
            raise error


def test_a_silent_rank_is_named_with_the_stacks_of_every_process_before_the_run_ends(tmp_path: Path) -> None:
    named = r"^trainer\.0 has been silent for 21 s, since it began: a micro-batch; stacks .*/stacks-.*; then: the trainer hangs"
    with hanging(tmp_path), pytest.raises(AsyncmoeError, match=named):
        watched(tmp_path, (0.0, 4.9, 6.0, 10.0, 21.0), "watch.end_after_s=20")
    assert len(json.loads((tmp_path / "said.json").read_text())) == 1  # of one silence once
    (path,) = (tmp_path / "logs").glob("stacks-*.txt")
    assert path.read_text().startswith("trainer.0 has been silent for 6 s, since it began: a micro-batch\n== trainer.0, pid")
    assert "hangs_here" in path.read_text()


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


# ---------------------------------------------------------------- the start


def test_what_a_start_has_reached_is_said_once_and_until_the_first_step(tmp_path: Path) -> None:
    """A resumed run counts its groups from where it stopped."""
    config, now, said = loaded(tmp_path, "warmup.steps=2", "watch.beat_s=0.1"), [100.0], list[str]()
    warm, waits = Step(step=2, phase="warmup", time=0.0), Rollout(time=0.0, accepted=64)
    joined = Rollout(time=0.5, accepted=64, engine_utilization={"engine.0": 0.0, "engine.1": 0.0})
    serves, scored = (Rollout(time=1.0, accepted=count, engines_serving=1) for count in (64, 72))

    def feed(role: str, does: str, *records: Step | Rollout) -> list[str]:
        now[0] += 10.0
        said.clear()
        Heart(tmp_path, role, 1.0).beat(does)
        watcher.feed([])  # hears the heartbeat
        watcher.feed(list(records))
        return list(said)

    with watching.Watcher(config, clock=lambda: now[0]) as watcher:
        watcher.say = said.append
        assert feed("engine.1", "waiting for a controller") == []
        assert feed("engine.1", heartbeats.SERVES) == ["engine.1 is ready, 20 s after the start"]
        assert feed("trainer.1", "waiting for the batch of step 1", waits) == ["the trainer has loaded the model, 30 s after the start"]
        assert feed("trainer.0", "a micro-batch", warm, waits) == []
        assert feed("controller", "serves requests", joined) == ["engine.0 is ready, 50 s after the start"]
        assert feed("controller", "serves requests", serves) == ["engines have the trainer's weights, 60 s after the start"]
        assert feed("controller", "serves requests", serves, scored) == ["the first group is scored, 70 s after the start"]
        assert feed("controller", "serves requests", step(3)) == []
        assert feed("engine.2", heartbeats.SERVES) == []


# ---------------------------------------------------------------- alerts


def told_of(*batches: Sequence[Step | Rollout], seconds: float = 1.0) -> list[list[str]]:
    told, found = Told(), []
    for number, records in enumerate(batches):
        told, alerts = tell(told, records, number * seconds)
        found.append([one.event for one in alerts])
    return found


def test_each_event_is_told_once() -> None:
    broken, more = step(3, anomalies={"kl_engine": 3.2, "reward": None}, skipped_updates=1), step(4, anomalies={"kl_engine": 4.0})
    found = told_of([step(1)], [step(2)], [broken], [more], [step(5)], [broken])
    assert found == [[], [], ["anomaly"], [], [], ["anomaly"]]
    found = told_of([], [], [], [], [], [step(1)], [], [], [], [], seconds=NO_STEP_S / 2.5)
    assert found == [[], [], [], ["no_step"], [], [], [], [], ["no_step"], []]
    counts = (0, 1, 1, 3, 0, 1)  # the controller was started again before the fifth
    lost = {
        "engine_lost": [[Rollout(time=0.0, engines_lost=n)] for n in counts],
        "worker_lost": [[Rollout(time=0.0, workers_lost=n)] for n in counts],
    }
    for event, records in lost.items():
        assert told_of(*records) == [[], [event], [], [event], [], [event]]


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
    three = [Alert("failed", str(n), n) for n in range(3)]
    (said,) = sent(("sh", "-c", "echo no such room >&2; exit 3"), *three)
    assert "watch.alerts.command: status 3: no such room" in said
    assert len(sent(("/no/such/program",), *three)) == 1
    monkeypatch.setattr(alerts, "_TIMEOUT_S", 0.3)
    begin = time.monotonic()
    sent(("sleep", "60"), *(three * 50))
    assert time.monotonic() - begin < 3.0


def test_another_failure_while_a_process_is_silent_names_it_and_keeps_its_exit_code(tmp_path: Path) -> None:
    error = AsyncmoeError("rank 0: gloo timed out", exit_code=2)
    with pytest.raises(AsyncmoeError, match=r"^trainer\.1 has been silent for 6 s.*; then: rank 0: gloo timed out$") as caught:
        watched(tmp_path, (0.0, 6.0), role="trainer.1", error=error)
    assert caught.value.exit_code == 2


# ---------------------------------------------------------------- the processes that a run recorded, and `asyncmoe stacks`


def test_the_processes_of_a_run_are_shown_and_those_of_no_other(tmp_path: Path) -> None:
    """Not those of which another process has the pid now, nor the run's from which a directory was copied."""
    run, copy, moved = tmp_path / "run", tmp_path / "copy", tmp_path / "moved"
    with hanging(run) as root:
        shutil.copytree(run, copy)
        run.rename(moved)
        assert next(iter(stacks.stacks(moved))).startswith(f"== trainer.0, pid {root.pid}\n")
        (path,) = (moved / processes.FOLDER).glob("*.json")
        ours = msgspec.json.decode(path.read_bytes(), type=processes.Recorded)
        for changed in ({"started": ours.started - 1}, {"boot": "another"}):
            path.write_bytes(msgspec.json.encode(msgspec.structs.replace(ours, **changed)))
            for nothing in (moved, copy, tmp_path / "no"):
                with pytest.raises(UserError, match=f"{nothing}, which has no running process on this host"):
                    list(stacks.stacks(nothing))


def test_other_hosts_are_named(tmp_path: Path) -> None:
    processes.record(tmp_path, "engine.a/b")
    (path,) = (tmp_path / "processes").iterdir()
    assert path.name == "engine.a_b.json"
    ours = msgspec.json.decode(path.read_bytes(), type=processes.Recorded)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(ours, host="node2")))
    with pytest.raises(UserError, match=r"run the command on node2 \(engine\.a/b\)"):
        list(stacks.stacks(tmp_path))


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "processes").mkdir()
    (tmp_path / "processes" / "x.json").write_text("{}")
    with pytest.raises(DataError, match=r"x\.json: .*delete it"):
        processes.read(tmp_path)
    assert processes.started(1 << 30) is None
