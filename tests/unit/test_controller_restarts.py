"""The supervision starts a lost controller again, and leaves the trainer alone."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch import trainer_starts, watch
from asyncmoe.launch.local_keeper import Adopted, wait_for_left
from asyncmoe.launch.run_processes import Process, Processes
from asyncmoe.process import Child
from asyncmoe.telemetry import processes
from tests.unit.telemetry_runs import write_run
from tests.unit.test_trainer_restarts import impatient

ROOT = Path(__file__).parents[2]
KILLED, SERVES = "kill -9 $$", 'until [ -e "{0}/done" ]; do sleep 0.05; done'
TRAINS = 'until [ -e "{0}/served" ]; do sleep 0.05; done; touch "{0}/done"'


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(watch, "_SETTLE_S", 0.1)
    monkeypatch.setattr(watch, "_UNEXPLAINED_S", 0.3)
    monkeypatch.setattr(trainer_starts, "FIRST_WAIT_S", 0.1)
    write_run(tmp_path / "run", rl=3)
    return configuration.load(ROOT / "examples" / "demo.yaml", [f"run.dir={tmp_path / 'run'}", "telemetry.live=off", "watch.beat_s=0.1"])


class Controllers:
    """Controllers in shell, one script a start."""

    def __init__(self, folder: Path, scripts: list[str]) -> None:
        self.folder, self.scripts, self.starts = folder, scripts, 0

    def start(self, epoch: int) -> tuple[Process, ...]:
        script = self.scripts[min(self.starts, len(self.scripts) - 1)].format(self.folder)
        self.starts += 1
        self.child = Child("controller", ["sh", "-c", script], self.folder / "controller.log")
        return (self.child,)

    def prepare(self) -> None:
        pass

    def end(self) -> None:
        self.child.end(0.0)


def supervised(config: Config, folder: Path, scripts: list[str], keeper: str = SERVES, trains: str = TRAINS) -> Controllers:
    controllers = Controllers(folder, scripts)

    def start(ending: ExitStack) -> Processes:
        kept = Child("keeper", ["sh", "-c", keeper.format(folder)], folder / "keeper.log")
        trainer = Child("trainer", ["sh", "-c", trains.format(folder)], folder / "trainer.log")
        (controller,) = controllers.start(0)
        for end in (kept, trainer):
            ending.callback(end.end, 1.0)
        ending.callback(controllers.end)
        return Processes(controller, (trainer,), (kept,), controllers=controllers)

    watch.supervise(config, start)
    return controllers


def test_a_killed_controller_is_started_again_beside_the_same_trainer(
    configured: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = supervised(configured, tmp_path, [KILLED, f'touch "{{0}}/served"; {SERVES}'])
    assert found.starts == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "the controller starts again, restart 1 of 2 without a new step: controller ended with status -9" in said


def test_one_that_dies_at_once_ends_the_run_with_its_cause(configured: Config, tmp_path: Path) -> None:
    with pytest.raises(AsyncmoeError) as caught:
        supervised(configured, tmp_path, [KILLED])
    assert str(caught.value).startswith("controller ended with status -9; its log is ")
    assert str(caught.value).endswith("; the controller was lost 3 times without a new step; run.controller_restarts is 2")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'error: controller on here: no engine is left'; exit 1", "controller on here: no engine is left"),
        ("echo 'error: port 5: got in use'; exit 2", "port 5: got in use"),
    ],
)
def test_one_that_says_why_it_ends_is_not_started_again(configured: Config, tmp_path: Path, script: str, said: str) -> None:
    with pytest.raises(AsyncmoeError, match=f"^{said}$"):
        supervised(configured, tmp_path, [script, SERVES])


def test_without_engines_no_controller_is_started(configured: Config, tmp_path: Path) -> None:
    with pytest.raises(AsyncmoeError, match="ended with status -9"):
        supervised(configured, tmp_path, [f"sleep 0.5; {KILLED}", SERVES], keeper=KILLED)


def test_a_hung_controller_is_killed_and_started_again(configured: Config, tmp_path: Path) -> None:
    beats = configured.run.dir / "heartbeats"
    beats.mkdir(exist_ok=True)
    hangs = f"""echo '{{{{"role": "controller", "pid": 1, "number": 1, "does": "serves"}}}}' > {beats}/controller.json; sleep 600"""
    assert supervised(impatient(configured), tmp_path, [hangs, f'touch "{{0}}/served"; {SERVES}']).starts == 2


def test_a_keeper_that_another_launcher_started_is_followed_and_ended(tmp_path: Path) -> None:
    child = Child("keeper", ["sleep", "60"], tmp_path / "keeper.log", outlives=True)
    adopted = Adopted(processes.of("keeper", child.pid, tmp_path), tmp_path / "keeper.log")
    assert adopted.returncode is None
    assert not adopted.wait(0.1)
    adopted.end(5.0)
    assert adopted.returncode == 0
    assert child.wait(5.0)
    assert child.returncode == -signal.SIGTERM


def test_what_a_lost_launcher_left_is_waited_for(tmp_path: Path) -> None:
    left = Child("controller", ["sh", "-c", "sleep 1"], tmp_path / "controller.log")
    record = processes.of("controller", left.pid, tmp_path)
    (tmp_path / processes.FOLDER).mkdir()
    (tmp_path / processes.FOLDER / "controller.json").write_bytes(msgspec.json.encode(record))
    processes.record(tmp_path, "supervisor")
    wait_for_left(tmp_path)
    assert left.returncode is None, "its launcher runs"
    (tmp_path / processes.FOLDER / "supervisor.json").unlink()
    wait_for_left(tmp_path)
    assert left.returncode == 0
