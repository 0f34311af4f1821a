"""Temporary files of child processes are deleted with their owner, or by the next start after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncmoe.scratch import Scratch

LEAVES = """
import tempfile
tempfile.mkstemp()
tempfile.mkdtemp(prefix="torchelastic_")
"""
KILLED = f"""
import os, signal, subprocess, sys
from asyncmoe.scratch import Scratch
made = Scratch()
subprocess.run([sys.executable, "-c", {LEAVES!r}], env=os.environ | made.environment(), check=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for temporary files."""
    base = tmp_path / "t"
    base.mkdir()
    monkeypatch.setenv("TMPDIR", str(base))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it in a process that has compiled
    yield base
    tempfile.tempdir = None


def entries(base: Path) -> set[str]:
    """Names in the folder for temporary files, without the cache of compiled code, which stays."""
    return {path.name for path in base.iterdir()} - {f"torchinductor_{os.geteuid()}"}


def test_what_a_child_leaves_is_removed_with_its_folder(base: Path) -> None:
    made = Scratch()
    subprocess.run([sys.executable, "-c", LEAVES], env=os.environ | made.environment(), check=True)
    assert len(list(made.path.iterdir())) == 3
    made.remove()
    made.remove()
    assert entries(base) == set()


def test_the_next_start_removes_what_a_killed_process_left_and_nothing_else(base: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], cwd=Path(__file__).parents[2], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = entries(base)
    others = base / "asyncmoe-aaaaaaaa", base / "asyncmoe-wire-bbbbbbbb"
    for other in others:
        other.mkdir(0o755)
        (other / ".lock").touch()
    (base / "asyncmoe-cccccccc").symlink_to(others[0])
    living = Scratch()
    assert not (base / left).exists()
    again = Scratch()
    assert entries(base) == {*(o.name for o in others), "asyncmoe-cccccccc", living.path.name, again.path.name}
    living.remove()
    again.remove()


def test_compiled_code_of_another_user_is_never_taken(base: Path) -> None:
    made = Scratch()
    usual = base / f"torchinductor_{os.geteuid()}"
    assert made.environment()["TORCHINDUCTOR_CACHE_DIR"] == str(usual)
    assert usual.stat().st_mode & 0o777 == 0o700
    usual.chmod(0o755)
    assert made.environment()["TORCHINDUCTOR_CACHE_DIR"] == str(usual)
    assert usual.stat().st_mode & 0o777 == 0o700
    usual.chmod(0o777)
    assert made.environment()["TORCHINDUCTOR_CACHE_DIR"] == str(made.path / usual.name)
    usual.rmdir()
    usual.symlink_to("/tmp")
    assert made.environment()["TORCHINDUCTOR_CACHE_DIR"] == str(made.path / usual.name)
    made.remove()
