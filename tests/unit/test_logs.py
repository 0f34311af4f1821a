"""Logs of child processes are bounded, and what a child said last is found in them."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path

import pytest

from asyncmoe import logs, process
from asyncmoe.logs import BoundedLog
from asyncmoe.process import Child

ROOT = Path(__file__).parents[2]
WRITER = """
import time
for number in range(400):
    print(f"line {number:05d} " + "x" * 88, flush=True)
    if number % 100 == 99:
        time.sleep(0.15)
print("error: the disk of node 7 is gone", flush=True)
"""


def sizes(path: Path) -> list[int]:
    return [one.stat().st_size for one in sorted(path.parent.glob(f"{path.name}*"))]


def test_a_child_that_writes_much_keeps_bounded_logs_and_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_LOOK_S", 0.02)
    monkeypatch.setattr(logs._Keeper, "_thread", None)  # one that looks more often
    monkeypatch.setattr(process, "BoundedLog", partial(BoundedLog, max_bytes=10_000, keep=2))
    path = tmp_path / "engine-0.log"
    path.write_text("error: of an earlier start\n")
    child = Child("engine.0", [sys.executable, "-c", WRITER], path)
    assert child.wait(30)
    assert child.reason == "the disk of node 7 is gone"
    assert len(sizes(path)) == 3
    assert max(sizes(path)) < 25_000  # a bound, and what comes between two looks
    kept = "".join(one.read_text() for one in (path.with_name("engine-0.log.2"), path.with_name("engine-0.log.1"), path))
    numbers = [int(line.split()[1]) for line in kept.splitlines() if line.startswith("line ")]
    assert numbers == list(range(numbers[0], 400))  # whole to the end, whatever was dropped before


def test_a_writer_goes_on_at_the_beginning_of_the_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    with path.open("ab", buffering=0) as writer:
        log = BoundedLog(path, 100, 1)
        writer.write(b"a" * 101)
        assert log.trim()
        writer.write(b"b")
        assert path.read_bytes() == b"b"
        assert log.output() == "a" * 101 + "b"
        assert not log.trim()
        writer.write(b"c" * 100)
        assert log.trim()
        assert log.output() == "b" + "c" * 100
        assert [one.name for one in sorted(tmp_path.iterdir())] == ["trainer.log", "trainer.log.1"]


def test_what_an_earlier_start_wrote_is_not_the_child_s(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    path.write_bytes(b"error: of an earlier start\n")
    with path.open("ab", buffering=0) as writer:
        log = BoundedLog(path, 30, 2)
        writer.write(b"ours, first\n")
        assert log.trim()
        writer.write(b"ours, second\n")
        assert log.output() == "ours, first\nours, second\n"


def test_modes_are_those_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * 11)
    path.chmod(0o600)
    assert BoundedLog(path, 10, 2).trim()
    assert os.stat(tmp_path / "a.log.1").st_mode & 0o777 == 0o600


def test_a_log_that_cannot_be_moved_stays_and_one_that_is_gone_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * 11)
    log = BoundedLog(path, 10, 1)
    (tmp_path / "a.log.part").mkdir()  # takes the copy's place
    assert not log.trim()
    assert path.read_bytes() == b"x" * 11
    path.unlink()
    assert not log.trim()


def test_one_thread_looks_after_all_logs_and_forgets_those_without_a_child(tmp_path: Path) -> None:
    made = [BoundedLog(tmp_path / f"{n}.log") for n in range(20)]
    assert sum(thread.name == "logs" for thread in threading.enumerate()) <= 2  # another test's, which looks more often
    watched = [weakref.ref(log) for log in made]
    assert all(any(ref() is log for log in logs._Keeper._logs) for ref in watched)
    made.clear()
    until = time.monotonic() + 30  # the thread may be looking at one of them
    while any(ref() is not None for ref in watched) and time.monotonic() < until:
        time.sleep(0.05)
    assert [ref() for ref in watched] == [None] * 20
