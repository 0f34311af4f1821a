"""A run that is interrupted before it works ends at once, and what it says is true."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from asyncmoe import config
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch import local, preflight, watch
from asyncmoe.process import Child
from asyncmoe.telemetry.schema import METRICS
from tests.unit.telemetry_runs import write_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def configured(tmp_path: Path) -> Config:
    return config.load(ROOT / "examples" / "demo.yaml", [f"run.dir={tmp_path / 'run'}", "telemetry.live=off"])


def checkpoint(run_dir: Path) -> Path:
    path = run_dir / "checkpoints" / "step-00000003"
    path.mkdir(parents=True)
    (path / "asyncmoe.json").write_text("{}")
    return path


@pytest.mark.parametrize("how", ["exec sleep 600", 'trap "exit 130" INT; sleep 600 & wait'], ids=["python starts", "it imports"])
def test_ctrl_c_before_the_controller_listens(configured: Config, tmp_path: Path, how: str) -> None:
    def start(ending: ExitStack) -> watch.Processes:
        controller = Child("controller", ["sh", "-c", f"echo ready; {how}"], tmp_path / "controller.log")
        ending.callback(controller.end, 5.0)
        trainer = Child("trainer", ["sleep", "600"], tmp_path / "trainer.log")
        ending.callback(trainer.end, 5.0)
        while "ready" not in controller.log.read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        return watch.Processes(controller, (trainer,))

    began = time.monotonic()
    with pytest.raises(AsyncmoeError, match=r"^stopped before the first step; the same command starts over$") as caught:
        watch.supervise(configured, start)
    assert caught.value.exit_code == 1
    assert time.monotonic() - began < watch.STOP_GRACE_S, "nobody waits for a trainer that waits for the controller"


def test_what_the_same_command_does_next_depends_on_what_is_there(tmp_path: Path) -> None:
    assert watch._stopped(tmp_path) == "stopped before the first step; the same command starts over"
    path = checkpoint(tmp_path)
    assert watch._stopped(tmp_path) == f"stopped at a checkpoint; the same command resumes from {path}"
    write_run(tmp_path / "run", rl=3)
    assert (tmp_path / "run" / METRICS).exists()
    assert watch._stopped(tmp_path / "run") == "stopped before the first checkpoint; the same command starts over"
    assert (tmp_path / "run" / "report.html").exists()


def test_ctrl_c_during_the_checks(configured: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Config) -> tuple[str, ...]:
        raise KeyboardInterrupt

    monkeypatch.setattr(preflight, "check", interrupted)
    with pytest.raises(AsyncmoeError, match=r"^stopped before the run was started; repeat the command to start it$"):
        local.run(configured)
    assert [path.name for path in configured.run.dir.iterdir()] == [".lock"]
