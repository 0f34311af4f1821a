"""The processes that a run recorded, and `asyncmoe stacks`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from asyncmoe.errors import DataError, UserError
from asyncmoe.launch import stacks
from asyncmoe.telemetry import processes

RUN = """
import subprocess, sys
from pathlib import Path
from asyncmoe.telemetry import processes
def waits_here():
    child.wait()
processes.record(Path(sys.argv[1]), "supervisor")
child = subprocess.Popen([sys.executable, "-c", "import time\\ndef hangs_here():\\n    time.sleep(600)\\nprint(flush=True)\\nhangs_here()"])
waits_here()
"""


@contextmanager
def _running(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that records itself, with a child."""
    with subprocess.Popen([sys.executable, "-c", RUN, str(run_dir)], stdout=subprocess.PIPE, text=True, start_new_session=True) as root:
        try:
            assert root.stdout is not None
            root.stdout.readline()
            yield root
        finally:
            for one in reversed(stacks.tree(processes.read(run_dir))):
                subprocess.run(["kill", str(one.pid)], check=False)


def test_every_process_of_a_run_is_shown(tmp_path: Path) -> None:
    with _running(tmp_path) as root:
        paragraphs = list(stacks.stacks(tmp_path))
        assert paragraphs[0].startswith(f"== supervisor, pid {root.pid}: ")
        assert paragraphs[1].startswith("== child of supervisor, pid ")
        assert "py-spy dump --pid PID" in paragraphs[2]
    with pytest.raises(UserError, match="no running process on this host"):
        list(stacks.stacks(tmp_path))


def test_a_pid_that_another_process_has_now_is_left_alone(tmp_path: Path) -> None:
    with _running(tmp_path) as root:
        (path,) = (tmp_path / "processes").glob("*.json")
        whole = path.read_bytes()
        ours = msgspec.json.decode(whole, type=processes.Recorded)
        assert ours.pid == root.pid
        for changed in ({"started": ours.started - 1}, {"boot": "another"}):
            path.write_bytes(msgspec.json.encode(msgspec.structs.replace(ours, **changed)))
            with pytest.raises(UserError, match="no running process"):
                list(stacks.stacks(tmp_path))
        path.write_bytes(whole)


def test_the_processes_of_a_run_are_not_those_of_its_copy(tmp_path: Path) -> None:
    run, copy, moved = tmp_path / "run", tmp_path / "copy", tmp_path / "moved"
    with _running(run) as root:
        shutil.copytree(run, copy)
        with pytest.raises(UserError, match="no running process on this host"):
            list(stacks.stacks(copy))
        run.rename(moved)
        assert next(iter(stacks.stacks(moved))).startswith(f"== supervisor, pid {root.pid}: ")
        moved.rename(run)


def test_a_path_that_is_no_run_is_named(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "no", "no such directory"), (tmp_path, "a directory without config.yaml")):
        with pytest.raises(UserError, match=f"{path}: {said}"):
            list(stacks.stacks(path))


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
