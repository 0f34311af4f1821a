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
import sys, time
from pathlib import Path
from asyncmoe.telemetry import heartbeats, processes
def hangs_here():
    print(flush=True)
    time.sleep(600)
run = Path(sys.argv[1])
processes.record(run, "trainer.0")
heartbeats.start(run, "trainer.0", 1.0)
heartbeats.beat("trains")
hangs_here()
"""


@contextmanager
def _running(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that records itself, and hangs."""
    with subprocess.Popen([sys.executable, "-c", RUN, str(run_dir)], stdout=subprocess.PIPE, text=True) as root:
        try:
            assert root.stdout is not None
            root.stdout.readline()
            yield root
        finally:
            root.kill()


def test_the_processes_of_a_run_are_shown_and_those_of_no_other(tmp_path: Path) -> None:
    """Not those of which another process has the pid now, nor the run's from which a directory was copied."""
    run, copy, moved = tmp_path / "run", tmp_path / "copy", tmp_path / "moved"
    with _running(run) as root:
        assert "in hangs_here" in next(iter(stacks.stacks(run)))
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
