"""Processes that stand by for the next start of a part, and what their launcher makes of them."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.launch.local_trainer import LocalTrainer, trainer_command
from asyncmoe.launch.prepared import Prepared
from asyncmoe.process import Child
from asyncmoe.rpc import stand_by
from asyncmoe.rpc.environment import STAND_BY, TRAINER_EPOCH, trainer_epoch

ROOT = Path(__file__).parents[2]
RANK = """
import os, time
from pathlib import Path
from asyncmoe.process import die_with_parent
from asyncmoe.rpc import stand_by
die_with_parent(int(os.environ["ASYNCMOE_AGENT"]))
me = f"{os.environ['RANK']} {os.getpid()}"
with Path("loaded").open("a") as file:
    print(me, file=file)
stand_by.wait()
with Path("began").open("a") as file:
    print(me, os.environ["ASYNCMOE_TRAINER_EPOCH"], "ASYNCMOE_STAND_BY" in os.environ, file=file)
time.sleep(60)
"""


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def gone(pid: str) -> Callable[[], bool]:
    return lambda: not Path(f"/proc/{pid}").exists()


def lines(path: Path) -> list[str]:
    return sorted(path.read_text().splitlines()) if path.exists() else []


def test_a_process_waits_for_its_file_and_learns_the_trainers_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "word"
    monkeypatch.setenv(TRAINER_EPOCH, "0")
    monkeypatch.setenv(STAND_BY, str(file))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(stand_by.wait)
        time.sleep(0.3)
        assert not waiting.done()
        stand_by.go_on(file, 2)
        waiting.result(10)
    assert trainer_epoch() == 2
    assert not stand_by.is_told()
    stand_by.wait()  # at once


def sleeper(folder: Path, started: list[Child], script: str = "sleep 60") -> Callable[[Mapping[str, str]], Child]:
    def start(more: Mapping[str, str]) -> Child:
        started.append(Child("trainer", ["sh", "-c", script], folder / "log", more))
        return started[-1]

    return start


def test_one_process_stands_by_and_is_taken_once(tmp_path: Path) -> None:
    started: list[Child] = []
    prepared = Prepared(tmp_path, sleeper(tmp_path, started))
    assert prepared.take(1) is None
    prepared.prepare()
    prepared.prepare()
    assert len(started) == 1
    assert prepared.take(3) is started[0]
    (file,) = tmp_path.glob(".stand-by-*")
    assert file.read_text() == "3"
    assert prepared.take(4) is None
    prepared.prepare()
    assert len(started) == 2
    assert not list(tmp_path.glob(".stand-by-*")), "whoever went on has read it"
    prepared.end(1.0)
    assert started[1].returncode is not None
    started[0].end(0.0)


def test_one_that_is_lost_is_replaced_a_few_times_and_then_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    started: list[Child] = []
    prepared = Prepared(tmp_path, sleeper(tmp_path, started, "kill -9 $$"))
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            prepared.prepare()
            assert started[-1].wait(10.0)
    assert len(started) == 3
    assert caplog.text.count("the next start was lost while it stood by: trainer ended with status -9") == 3
    assert prepared.take(1) is None


def test_one_that_cannot_be_started_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tried: list[str] = []

    def start(more: Mapping[str, str]) -> Child:
        tried.append(more[STAND_BY])
        return Child("trainer", [str(tmp_path / "absent")], tmp_path / "log", more)

    prepared = Prepared(tmp_path, start)
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            prepared.prepare()
    assert len(tried) == 3
    assert caplog.text.count("the next start cannot be prepared: trainer: ") == 3
    assert prepared.take(1) is None


@pytest.mark.parametrize(("parent", "status"), [("os.getppid()", 0), ("os.getpid()", 143)])
def test_a_process_whose_parent_has_ended_already_ends_too(parent: str, status: int) -> None:
    script = f"import os; from asyncmoe.process import die_with_parent; die_with_parent({parent})"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60).returncode == status


@pytest.fixture
def trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalTrainer]:
    """Two ranks under torchrun, which write down when they are loaded and when they begin."""
    (tmp_path / "rank.py").write_text(RANK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    config = configuration.load(ROOT / "examples" / "demo.yaml", [f"run.dir={tmp_path / 'run'}", "trainer.ranks=2"])
    config.run.dir.mkdir()

    def command(config: Config, file: Path) -> list[str]:
        return trainer_command(config, file, "rank")

    made = LocalTrainer(config, tmp_path / "config.yaml", command)
    yield made
    made.stop()


def test_ranks_under_torchrun_stand_by_and_go_on_with_the_next_start(trainers: LocalTrainer, tmp_path: Path) -> None:
    trainers.start(0)
    until(lambda: len(lines(tmp_path / "began")) == 2)
    trainers.prepare()
    until(lambda: len(lines(tmp_path / "loaded")) == 4)
    time.sleep(0.3)
    assert len(lines(tmp_path / "began")) == 2, "the others stand by"
    trainers.end()
    (torchrun,) = trainers.start(1)
    until(lambda: len(lines(tmp_path / "began")) == 4)
    began = [line.split() for line in lines(tmp_path / "began")]
    assert {(rank, epoch) for rank, _, epoch, _ in began} == {("0", "0"), ("1", "0"), ("0", "1"), ("1", "1")}
    assert {told for *_, told in began} == {"False"}
    assert [pid for _, pid, epoch, _ in began if epoch == "1"] == [
        line.split()[1]
        for line in lines(tmp_path / "loaded")
        if line not in {f"{rank} {pid}" for rank, pid, epoch, _ in began if epoch == "0"}
    ]
    assert not torchrun.wait(0.0)
    trainers.stop()
    assert torchrun.wait(0.0)
    assert not list((tmp_path / "run").glob(".stand-by-*"))


def test_ranks_that_stand_by_end_with_the_run(trainers: LocalTrainer, tmp_path: Path) -> None:
    trainers.prepare()
    until(lambda: len(lines(tmp_path / "loaded")) == 2)
    trainers.stop()
    for line in lines(tmp_path / "loaded"):
        until(gone(line.split()[1]), 10.0)
    assert not lines(tmp_path / "began")
