"""A run interrupted during its start ends at once, with a correct message."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from asyncmoe.config import Config
from asyncmoe.errors import Interrupted
from asyncmoe.launch import watch
from asyncmoe.launch.run_processes import STOP_GRACE_S
from asyncmoe.process import Child, wait_until
from tests.configs import demo
from tests.unit.supervised import table_of


@pytest.fixture
def configured(tmp_path: Path) -> Config:
    return demo(f"run.dir={tmp_path / 'run'}")


def stops(configured: Config, tmp_path: Path, controls: str, trains: str, *signals: int) -> Interrupted:
    """Supervise shell scripts as a run that receives signals; what it says in the end. Each script says `ready` when it listens."""

    def trainer(_: int) -> Child:
        child = Child("trainer", ["sh", "-c", trains], tmp_path / "trainer.log")
        assert wait_until(lambda: all("ready" in (tmp_path / f"{name}.log").read_text() for name in ("controller", "trainer")), 60)
        for number in signals:
            os.kill(os.getpid(), number)
        return child

    starts = {"controller": lambda _: Child("controller", ["sh", "-c", controls], tmp_path / "controller.log"), "trainer": trainer}
    with pytest.raises(Interrupted) as caught:
        watch.supervise(configured, *table_of(configured, starts))
    return caught.value


SLEEPS = "echo ready; exec sleep 600"


@pytest.mark.parametrize(
    ("controls", "trains", "number", "status"),
    [
        pytest.param(SLEEPS, SLEEPS, signal.SIGINT, 130, id="while the controller's Python starts"),
        pytest.param('trap "exit 130" INT; echo ready; sleep 600 & wait', SLEEPS, signal.SIGINT, 130, id="while it imports"),
        pytest.param(
            'trap "sleep 1; exit 0" INT; echo ready; while :; do sleep 0.1; done',
            "echo ready; sleep 0.5; echo 'error: waited 1.0 s for the controller: the connection was lost'; exit 1",
            signal.SIGINT,
            130,
            id="a trainer that loses a stopping controller has not failed",
        ),
        pytest.param('trap "exit 0" INT; echo ready; sleep 600 & wait', "echo ready", signal.SIGTERM, 143, id="SIGTERM"),
    ],
)
def test_a_stop_before_the_first_step(configured: Config, tmp_path: Path, controls: str, trains: str, number: int, status: int) -> None:
    began = time.monotonic()
    said = stops(configured, tmp_path, controls, trains, number)
    assert (str(said), said.exit_code) == ("stopped before the first step; the same command starts over", status)
    assert time.monotonic() - began < STOP_GRACE_S, "nobody waits for a trainer that waits for the controller"


@pytest.mark.parametrize("pressed", [2, 3])
def test_ctrl_c_again_ends_at_once(configured: Config, tmp_path: Path, pressed: int) -> None:
    path = configured.run.dir / "checkpoints" / "step-00000003"
    path.mkdir(parents=True)
    (path / "asyncmoe.json").write_text('{"step": 3}')
    began = time.monotonic()
    deaf = 'trap "" INT TERM; echo ready; sleep 600 & wait'
    said = stops(configured, tmp_path, deaf, SLEEPS, *[signal.SIGINT] * pressed)
    assert str(said).startswith("ended at once at step 3 of ")
    assert said.exit_code == 130
    assert time.monotonic() - began < 30


def test_a_run_in_turn_says_which_share_of_a_switch_its_bytes_need(configured: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch.models, "hf_config_of", lambda _: {})
    monkeypatch.setattr(watch.switch, "bound", lambda *_: {"trainer_in": 0.1, "engines_in": 0.2})
    in_turn = configured.model_copy(update={"placement": "colocated"})
    (line,) = watch.switched(in_turn, {"trainer_in": 0.5, "update": 1.0})
    assert "1.5 s" in line
    assert "20 %" in line
    assert watch.switched(in_turn, None) == watch.switched(configured, {"update": 1.0}) == []
