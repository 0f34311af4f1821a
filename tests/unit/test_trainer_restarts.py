"""The supervision starts a lost trainer again, and leaves the controller alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import yaml

from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.config.model import MadeModel
from asyncmoe.errors import AsyncmoeError, Interrupted, UserError
from asyncmoe.launch import trainer_starts, watch
from asyncmoe.launch.local_trainer import LocalTrainer
from asyncmoe.launch.run_processes import Processes
from asyncmoe.launch.torchrun import free_port, torchrun
from asyncmoe.models.make import make_model
from asyncmoe.process import Child
from asyncmoe.telemetry import processes
from asyncmoe.telemetry.records import trainer_restarts as counted
from asyncmoe.telemetry.schema import METRICS, Resume
from tests.unit.telemetry_runs import write_run

ROOT = Path(__file__).parents[2]
RANK = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from asyncmoe.telemetry import processes
folder = Path(sys.argv[1])
epoch = os.environ["ASYNCMOE_TRAINER_EPOCH"]
processes.record(folder / "run", "trainer.0")
with (folder / "starts").open("a") as file:
    print(epoch, os.getpid(), file=file)
{acts}
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
CONTROLS = 'until [ -e "{0}/done" ]; do sleep 0.05; done'


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(watch, "_SETTLE_S", 0.1)
    monkeypatch.setattr(watch, "_UNEXPLAINED_S", 0.3)
    monkeypatch.setattr(trainer_starts, "FIRST_WAIT_S", 0.1)
    run_dir = tmp_path / "run"
    write_run(run_dir, rl=3)
    return configuration.load(ROOT / "examples" / "demo.yaml", [f"run.dir={run_dir}", "telemetry.live=off", "watch.beat_s=0.1"])


def supervised(config: Config, folder: Path, acts: str, controls: str = CONTROLS) -> dict[str, object]:
    """Supervise a controller in shell and a trainer of one rank, which `acts` in Python."""

    def command(_: Config, __: Path) -> list[str]:
        return [sys.executable, "-c", RANK.format(root=str(ROOT), acts=acts), str(folder)]

    def start(ending: ExitStack) -> Processes:
        controller = Child("controller", ["sh", "-c", controls.format(folder)], folder / "controller.log")
        ending.callback(controller.end, 1.0)
        trainer = LocalTrainer(config, folder / "config.yaml", command)
        ending.callback(trainer.end)
        (folder / "controller").write_text(str(controller.pid))
        return Processes(controller, trainer.start(0), starter=trainer)

    return watch.supervise(config, start)


def impatient(configured: Config) -> Config:
    """A run that does not wait long for what is silent."""
    waits = ["telemetry.live=off", "watch.beat_s=0.1", "watch.stacks_after_s=0.5", "watch.end_after_s=1"]
    return configuration.load(ROOT / "examples" / "demo.yaml", [f"run.dir={configured.run.dir}", *waits])


def starts(folder: Path) -> list[int]:
    return [int(line.split()[0]) for line in (folder / "starts").read_text().splitlines()]


def test_a_killed_trainer_is_started_again_beside_the_same_controller(
    configured: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    acts = f"if epoch == '0': {KILLED}\n(folder / 'done').touch()"
    supervised(configured, tmp_path, acts)
    assert starts(tmp_path) == [0, 1]
    said = " ".join(capsys.readouterr().out.split())
    assert "the trainer starts again, restart 1 of 2 without a new step: trainer ended with status -9" in said


def test_a_trainer_that_dies_at_once_ends_the_run_with_its_cause(configured: Config, tmp_path: Path) -> None:
    acts = "print('error: a rank was ended by SIGSEGV: rank 0 on here', file=sys.stderr)\nsys.exit(139)"
    with pytest.raises(AsyncmoeError) as caught:
        supervised(configured, tmp_path, acts)
    cause = "a rank was ended by SIGSEGV: rank 0 on here"
    assert str(caught.value) == f"{cause}; the trainer was lost 3 times without a new step; trainer.max_restarts is 2"
    assert caught.value.exit_code == 1
    assert starts(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize("status", [2, 3])
def test_a_failure_that_would_recur_ends_the_run_at_once(configured: Config, tmp_path: Path, status: int) -> None:
    acts = f"print('error: trainer.0 on here: the loss is nan', file=sys.stderr)\nsys.exit({status})"
    with pytest.raises(AsyncmoeError, match=r"^trainer\.0 on here: the loss is nan$") as caught:
        supervised(configured, tmp_path, acts)
    assert (caught.value.exit_code, starts(tmp_path)) == (status, [0])


def test_without_a_controller_no_trainer_is_started(configured: Config, tmp_path: Path) -> None:
    acts = f"os.kill(int((folder / 'controller').read_text()), signal.SIGKILL); time.sleep(0.2); {KILLED}"
    with pytest.raises(AsyncmoeError, match="controller ended with status -9"):
        supervised(configured, tmp_path, acts)
    assert starts(tmp_path) == [0]


def test_a_controller_that_fails_after_a_loss_does_not_hide_it(configured: Config, tmp_path: Path) -> None:
    acts = f"if epoch == '0': {KILLED}\n(folder / 'again').touch(); time.sleep(60)"
    controls = 'until [ -e "{0}/again" ]; do sleep 0.05; done; echo "error: controller on here: no engine is left"; exit 1'
    with pytest.raises(AsyncmoeError) as caught:
        supervised(configured, tmp_path, acts, controls)
    said = "controller on here: no engine is left; the trainer was lost before: trainer ended with status -9"
    assert str(caught.value).startswith(said)


def test_ctrl_c_between_two_starts_ends_the_run(configured: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_starts, "FIRST_WAIT_S", 60.0)
    later = "import subprocess; subprocess.Popen(['sh', '-c', f'sleep 2; kill -INT {os.getppid()}'], start_new_session=True)"
    acts = f"if epoch == '1': {later}\n{KILLED}"
    began = time.monotonic()
    with pytest.raises(Interrupted, match=r"^stopped before the first checkpoint"):
        supervised(configured, tmp_path, acts)
    assert starts(tmp_path) == [0, 1]
    assert time.monotonic() - began < 30


def test_a_rank_that_is_stopped_does_not_outlive_its_trainer(configured: Config, tmp_path: Path) -> None:
    acts = "signal.raise_signal(signal.SIGSTOP)"
    rank_of_its_own_session = ["sh", "-c", 'setsid "$@" & wait', "agent", sys.executable, "-c", RANK.format(root=str(ROOT), acts=acts)]
    trainer = LocalTrainer(configured, tmp_path, lambda *_: [*rank_of_its_own_session, str(tmp_path)])
    (child,) = trainer.start(0)
    while not (tmp_path / "starts").exists():
        assert child.returncode is None
        time.sleep(0.02)
    trainer.end()
    (rank,) = [one for one in processes.read(configured.run.dir) if one.role == "trainer.0"]
    while processes.runs(rank) and "Z" not in Path(f"/proc/{rank.pid}/stat").read_text().split()[2]:
        time.sleep(0.02)


def test_a_trainer_that_hangs_is_started_again(configured: Config, tmp_path: Path) -> None:
    acts = """
from asyncmoe.telemetry import heartbeats
heartbeats.start(folder / "run", "trainer.0", 0.1)
heartbeats.beat("a micro-batch")
if epoch == "0":
    time.sleep(600)
heartbeats.beat(heartbeats.ENDED)
(folder / "done").touch()
"""
    supervised(impatient(configured), tmp_path, acts)
    assert starts(tmp_path) == [0, 1]
    assert list((configured.run.dir / "logs").glob("stacks-*.txt"))


def test_a_hung_controller_ends_the_run(configured: Config, tmp_path: Path) -> None:
    acts = """
import msgspec
for role in ("controller", "trainer.0"):
    path = folder / "run" / "heartbeats" / f"{role}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{"role": "{role}", "pid": 1, "number": 1, "does": "nothing"}}')
time.sleep(600)
"""
    with pytest.raises(AsyncmoeError, match=r"has been silent for .*waited 1 s"):
        supervised(impatient(configured), tmp_path, acts)
    assert starts(tmp_path) == [0]


def test_restarts_are_counted_over_all_starts_of_a_run() -> None:
    assert counted([]) == 0
    assert counted([Resume(resumed_at=0, epoch=epoch) for epoch in (0, 1, 3, 0, 1)]) == 4


def test_the_summary_counts_restarts(configured: Config) -> None:
    with (configured.run.dir / METRICS).open("ab") as file:
        file.write(msgspec.json.encode(Resume(resumed_at=30, epoch=2)) + b"\n")
    assert watch.write_summary(configured.run.dir)["trainer_restarts"] == 2


FAMILY = """
from dataclasses import replace
from asyncmoe.models.qwen3_moe import FAMILY as QWEN
ODD = replace(QWEN, router=lambda hf: {"moe_router_score_function": "softmax", "moe_router_pre_softmax": False, "moe_router_topk": 1})
"""


def test_a_model_that_megatron_refuses_ends_the_trainer_with_a_users_error(tmp_path: Path) -> None:
    """Which is not started again."""
    make_model(tmp_path / "model", MadeModel(), seed=0)
    (tmp_path / "odd.py").write_text(FAMILY)
    settings = [f"run.dir={tmp_path}", f"model.path={tmp_path / 'model'}", "model.family=odd:ODD", "trainer.ranks=1", "trainer.ep=1"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(configuration.load(ROOT / "examples/demo.yaml", settings).model_dump(mode="json")))
    command = [sys.executable, *torchrun(1, ("127.0.0.1", free_port("127.0.0.1")), "asyncmoe.trainer", str(tmp_path / "run.yaml"))]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert f"the model {tmp_path / 'model'}: got ValueError(" in done.stdout + done.stderr
    assert done.returncode == UserError.exit_code
