"""The supervisor restarts lost processes, by the rule (`test_rule`), and leaves the rest alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch import local, rule, watch
from asyncmoe.process import Child, wait_until
from asyncmoe.telemetry import processes
from tests.configs import demo
from tests.unit.supervised import supervised
from tests.unit.telemetry_runs import write_run

ROOT = Path(__file__).parents[2]
KILLED, DONE = "kill -9 $$", 'touch "{0}/done"'
SERVES = 'until [ -e "{0}/done" ]; do sleep 0.05; done'
CONTROLLER, ENGINE = {"controller": [SERVES]}, {"engine.0": [SERVES]}


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(watch, "_SETTLE_S", 0.1)
    monkeypatch.setattr(watch, "_UNEXPLAINED_S", 0.3)
    monkeypatch.setattr(rule, "FIRST_WAIT_S", 0.1)
    write_run(tmp_path / "run", rl=3)
    return of(tmp_path / "run", "watch.beat_s=0.1")


def of(run_dir: Path, *settings: str) -> Config:
    return demo(f"run.dir={run_dir}", *settings)


@pytest.mark.parametrize(
    ("part", "scripts", "starts"),
    [
        ("trainer", CONTROLLER | ENGINE | {"trainer": [f'[ "$BEFORE" = 2 ] && {DONE} || {KILLED}']}, (1, 1, 3)),
        ("controller", {"controller": [KILLED, SERVES]} | ENGINE | {"trainer": ["sleep 60", DONE]}, (2, 1, 2)),
        ("engine.0", CONTROLLER | {"engine.0": [KILLED, f"{DONE}; sleep 60"]} | {"trainer": [SERVES]}, (1, 2, 1)),
    ],
)
def test_a_part_that_is_killed_starts_again(
    configured: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str, scripts: dict[str, list[str]], starts: Sequence[int]
) -> None:
    assert tuple(supervised(configured, tmp_path, scripts).values()) == tuple(starts)
    said = " ".join(capsys.readouterr().out.split())
    who = part if part == "engine.0" else f"the {part}"
    most = 3 if part == "engine.0" else 2
    assert f"{who} starts again, restart 1 of {most} without a new step: {part} ended with status -9" in said


SEGFAULT = "echo 'error: a rank was ended by SIGSEGV: rank 0 on here'; exit 139"
AGAIN = 'touch "{0}/again"; sleep 60'
NO_ENGINE = 'until [ -e "{0}/again" ]; do sleep 0.05; done; echo "error: controller on here: no engine is left"; exit 1'


@pytest.mark.parametrize(
    ("scripts", "said"),
    [
        (CONTROLLER | {"trainer": [SEGFAULT]}, r"a rank was ended by SIGSEGV: rank 0 on here; the trainer was lost 3 times .*"),
        ({"controller": ["sleep 0.3"], "trainer": ["sleep 1; echo 'error: waited 1 s for the controller'; exit 1"]}, "waited 1 s .*"),
        ({"controller": [NO_ENGINE], "trainer": [KILLED, AGAIN]}, "controller on here: no engine is left; the trainer was lost before: .*"),
    ],
)
def test_what_cannot_start_again_ends_the_run_with_its_cause(
    configured: Config, tmp_path: Path, scripts: dict[str, list[str]], said: str
) -> None:
    with pytest.raises(AsyncmoeError, match=f"^{said}$") as caught:
        supervised(configured, tmp_path, scripts)
    assert caught.value.exit_code == 1


def test_a_run_goes_on_without_an_engine_whose_server_was_lost_too_often(
    configured: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone, over = f"echo 'error: engine.1 died: killed'; {DONE}; exit 4", 'until [ -e "{0}/over" ]; do sleep 0.05; done'
    scripts = {"controller": [over], "engine.0": [over], "engine.1": [gone], "trainer": [f'{SERVES}; sleep 1; touch "{{0}}/over"']}
    assert supervised(configured, tmp_path, scripts)["engine.1"] == 1
    assert "the run goes on without engine.1: engine.1 died: killed" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("part", ["controller", "trainer"])
def test_a_part_that_hangs_is_killed_and_started_again(configured: Config, tmp_path: Path, part: str) -> None:
    beats = configured.run.dir / "heartbeats"
    beats.mkdir(exist_ok=True)
    role = "controller" if part == "controller" else "trainer.0"
    hangs = f"""echo '{{{{"role": "{role}", "pid": 1, "number": 1, "does": "serves"}}}}' > {beats}/{role}.json; sleep 600"""
    impatient = of(configured.run.dir, "watch.beat_s=0.1", "watch.stacks_after_s=0.5", "watch.end_after_s=1")
    scripts = {"controller": [SERVES], "trainer": [DONE]}
    scripts[part].insert(0, hangs)
    scripts["trainer"].insert(0, "sleep 600") if part == "controller" else None
    assert supervised(impatient, tmp_path, scripts)[part] == 2
    assert list((configured.run.dir / "logs").glob("stacks-*.txt"))


RANK = "import sys; from pathlib import Path; sys.path.insert(0, {0!r}); from asyncmoe.telemetry import processes; "
RECORDS = "processes.record(Path(sys.argv[1]), {1!r}); import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"


@pytest.mark.parametrize("role", ["trainer.0", "engine.0", "controller"])
def test_what_a_lost_launcher_has_left_is_ended_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    monkeypatch.setattr(local, "STOP_GRACE_S", 0.5)
    command = [sys.executable, "-c", (RANK + RECORDS).format(str(ROOT), role), str(tmp_path)]
    left = Child(role, command, tmp_path / "left.log")
    assert wait_until((tmp_path / processes.FOLDER / f"{role}.json").exists, 60), left.output()
    processes.record(tmp_path, "supervisor")
    local.end_left(tmp_path, engines=True)
    assert left.returncode is None, "its launcher runs"
    (tmp_path / processes.FOLDER / "supervisor.json").unlink()
    if role == "engine.0":
        local.end_left(tmp_path, engines=False)
        assert left.returncode is None, "engines that join are no launcher's"
    local.end_left(tmp_path, engines=True)
    assert left.wait(5.0)
