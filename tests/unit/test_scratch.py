"""Temporary files and shared memory of child processes go with the process that owns them, or with the next start after a kill."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncmoe import scratch
from asyncmoe.platform.sglang import shared_names
from asyncmoe.scratch import Scratch

LEAVES = """
import os, sys, tempfile
from pathlib import Path
tempfile.mkstemp()
tempfile.mkdtemp(prefix="torchelastic_")
(Path(sys.argv[1]) / f"sglang_loads_{os.environ['ASYNCMOE_SCRATCH']}.shm").touch()
"""
KILLED = f"""
import os, signal, subprocess, sys
from pathlib import Path
from asyncmoe import scratch
scratch.SHARED = Path(sys.argv[1])
made = scratch.Scratch()
subprocess.run([sys.executable, "-c", {LEAVES!r}, sys.argv[1]], env=os.environ | made.environment(), check=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """An empty folder for temporary files, and one that stands for /dev/shm."""
    base, shared = tmp_path / "t", tmp_path / "shm"
    base.mkdir()
    shared.mkdir()
    (shared / "sglang_loads_of_somebody_else.shm").touch()
    monkeypatch.setenv("TMPDIR", str(base))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it in a process that has compiled
    monkeypatch.setattr(scratch, "SHARED", shared)
    yield base, shared
    tempfile.tempdir = None


def entries(base: Path) -> set[str]:
    """Names in the folder for temporary files, without the cache of compiled code, which stays."""
    return {path.name for path in base.iterdir()} - {f"torchinductor_{getpass.getuser()}"}


def leave(made: Scratch, shared: Path) -> None:
    subprocess.run([sys.executable, "-c", LEAVES, str(shared)], env=os.environ | made.environment(), check=True)


def test_what_a_child_leaves_is_removed_with_its_folder(folders: tuple[Path, Path]) -> None:
    base, shared = folders
    made = Scratch()
    leave(made, shared)
    assert len(list(made.path.iterdir())) == 3
    assert len(list(shared.iterdir())) == 2
    made.remove()
    made.remove()
    assert entries(base) == set()
    assert [path.name for path in shared.iterdir()] == ["sglang_loads_of_somebody_else.shm"]


def test_the_next_start_removes_what_a_killed_process_left_and_nothing_else(folders: tuple[Path, Path]) -> None:
    base, shared = folders
    killed = subprocess.run([sys.executable, "-c", KILLED, str(shared)], cwd=Path(__file__).parents[2], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = entries(base)
    others = base / "asyncmoe-aaaaaaaa", base / "asyncmoe-wire-bbbbbbbb"
    for other in others:
        other.mkdir(0o755)
        (other / ".lock").touch()
    (base / "asyncmoe-cccccccc").symlink_to(others[0])
    living = Scratch()
    assert not (base / left).exists()
    assert [path.name for path in shared.iterdir()] == ["sglang_loads_of_somebody_else.shm"]
    again = Scratch()
    assert entries(base) == {*(o.name for o in others), "asyncmoe-cccccccc", living.path.name, again.path.name}
    living.remove()
    again.remove()


def test_the_caches_of_compilers_are_kept(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    made = Scratch()
    assert made.environment()["TORCHINDUCTOR_CACHE_DIR"].startswith(f"{folders[0]}/torchinductor_")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    assert made.environment()["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
    made.remove()


def test_shared_memory_of_a_server_has_the_name_of_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(scratch.VARIABLE, "asyncmoe-ab_defgh")
    module: Any = SimpleNamespace(shm_path_for=lambda name: f"/dev/shm/sglang_loads_{name}_77.shm", make_shm_name=None)
    shared_names._mend_loads(module)
    shared_names._mend_names(module)
    assert module.shm_path_for("x") == "/dev/shm/sglang_loads_x_77_asyncmoe-ab_defgh.shm"
    name = module.make_shm_name("mq")
    assert name.startswith("sgl_shm_mq_asyncmoe-ab_defgh_")
    assert int(name.split("_")[-2]) == os.getpid(), "SGLang's own sweep finds the pid here"


def test_compiled_code_of_another_user_is_never_taken(folders: tuple[Path, Path]) -> None:
    base, _ = folders
    made = Scratch()
    usual = base / f"torchinductor_{getpass.getuser()}"
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
