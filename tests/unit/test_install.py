"""The steps of `make setup GPU=1`, their order, and its refusals, with stand-ins for driver, nvcc, pip's index and torch."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from asyncmoe import build

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"
GPU: dict[str, Any] = runpy.run_path(str(FOLDER / "check_gpu.py"))
TORCH: dict[str, Any] = runpy.run_path(str(FOLDER / "check_torch.py"))
PINS = TORCH["pins"]()
VERSION = PINS["torch"]


def run(*command: object, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    whole = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "MFLAGS", "GPU"))} | dict(env or {})
    return subprocess.run(list(map(str, command)), cwd=cwd, env=whole, capture_output=True, text=True, timeout=120, check=False)


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout in which nothing is installed."""
    (tmp_path / "csrc").mkdir()
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(FOLDER, tmp_path / "requirements")
    return tmp_path


def commands(tree: Path, *arguments: str, target: str = "setup") -> list[str]:
    done = run("make", "--dry-run", "--no-print-directory", target, *arguments, cwd=tree)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def installed(tree: Path, gpu: int) -> None:
    """The state after a complete `make setup`."""
    stamps = [f".venv/.begun-gpu{gpu}", f".venv/.installed-gpu{gpu}", f".venv-engine/.installed-gpu{gpu}", f".venv/.built-gpu{gpu}"]
    for stamp in [*stamps, *([".venv/.transformer-engine"] if gpu else [])]:
        (tree / stamp).parent.mkdir(exist_ok=True)
        (tree / stamp).touch()


def place(lines: list[str], *words: str) -> int:
    """Of the one line that has all the words."""
    (found,) = [index for index, line in enumerate(lines) if all(word in line for word in words)]
    return found


@pytest.mark.parametrize("before", ["fresh", "for the CPU"])
def test_all_that_can_be_missing_is_looked_for_before_anything_large_is_fetched(tree: Path, before: str) -> None:
    if before != "fresh":
        installed(tree, 0)
    lines = commands(tree, "GPU=1")
    checks = [
        place(lines, "check_python.py"),
        place(lines, "check_gpu.py"),
        [line.endswith(" .venv") for line in lines].index(True),
        place(lines, "nvcc.sh"),
    ]
    large = [place(lines, "torch.sh .venv/"), place(lines, "torch.sh .venv-engine/"), place(lines, "engine-gpu.txt")]
    assert checks == sorted(checks)
    assert max(checks) < min(large)
    assert large[1] < large[2] < place(lines, ".venv-engine/bin/python requirements/check_torch.py")
    built = place(lines, "--editable .")
    assert lines[built].startswith("ASYNCMOE_CUDA=1 .venv/bin/python")
    assert large[0] < place(lines, "train.txt") < place(lines, ".venv/bin/python requirements/check_torch.py") < built
    assert built < place(lines, "transformer_engine.sh")
    assert [("--clear" in line) for line in lines if "-m venv" in line] == [before != "fresh"] * 2, "CPU builds do not stay beside others"


def test_a_layer_of_the_image_builds_transformer_engine_before_there_are_sources(tmp_path: Path) -> None:
    before, _, _ = (ROOT / "docker" / "cuda.Dockerfile").read_text().partition("RUN make ")
    for line in (line.split()[1:] for line in before.splitlines() if line.startswith("COPY ")):
        for name in line[:-1]:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    lines = commands(tmp_path, "GPU=1", target="transformer-engine")
    assert "transformer_engine.sh" in lines[-2]
    assert not any("--editable" in line for line in lines)
    for script in ("requirements/check_gpu.py", "asyncmoe/build.py"):
        assert "Traceback" not in run(sys.executable, "-P", script, cwd=tmp_path).stderr


# ---------------------------------------------------------------- Transformer Engine

STAND_IN = f"""
echo "$*" >> "$CALLS"
case "$*" in
  *" key") exec {sys.executable} "$@" ;;
  *check_transformer_engine.py) [ -z "${{UNLOADABLE:-}}" ] || {{ echo "ImportError: undefined symbol"; exit 1; }} ;;
  "-m pip wheel "*)
    [ -z "${{BROKEN:-}}" ] || {{ echo "error: g++ failed"; exit 1; }}
    while [ "$1" != --wheel-dir ]; do shift; done
    echo whole > "$2/transformer_engine_torch-2-cp311-cp311-linux_x86_64.whl" ;;
esac
"""
"""A Python whose pip builds at once, if it can."""


@dataclass(frozen=True)
class Builder:
    """Runs transformer_engine.sh with the stand-in and a torch that has a version."""

    folder: Path

    def __call__(self, torch: str = "2.14.1", **env: str) -> tuple[list[str], str]:
        """What pip was told, and the line for the user."""
        site, calls = self.folder / "site", self.folder / "calls"
        site.mkdir(exist_ok=True)
        (site / "torch.py").write_text(f"class version: cuda = '13.0'\n__version__ = '{torch}'\n")
        calls.write_text("")
        given = {"PYTHONPATH": str(site), "CALLS": str(calls), "ASYNCMOE_WHEELS": str(self.folder / "wheels"), **env}
        done = run(FOLDER / "transformer_engine.sh", program(self.folder / "python", STAND_IN), self.folder / "log", env=given)
        assert done.returncode == 0
        return [line for line in calls.read_text().splitlines() if "pip" in line], done.stderr

    @property
    def kept(self) -> list[Path]:
        return sorted(self.folder.glob("wheels/*/*.whl"))


def test_a_wheel_is_built_once_for_each_torch(tmp_path: Path) -> None:
    install = Builder(tmp_path)
    first, _ = install()
    (wheel,) = install.kept
    assert [sum(f"pip {what} " in line for line in first) for what in ("wheel", "install")] == [1, 2]
    assert "--no-cache-dir" in first[place(first, "pip wheel")], "pip's own cache does not know torch's version"
    again, told = install()
    assert (again[-1].endswith(f"--force-reinstall {wheel}"), len(again), told) == (True, 2, "")
    install(torch="2.15.0")
    assert len(install.kept) == 2


def test_what_does_not_work_is_not_kept_and_is_named(tmp_path: Path) -> None:
    install = Builder(tmp_path)
    for fault, why in (("BROKEN", "g++ failed"), ("UNLOADABLE", "undefined symbol")):
        _, told = install(**{fault: "1"})
        line = told.splitlines()[-1]
        for words in (why, "torch-2.14.1-cuda-13.0-cpython-3", str(tmp_path / "log"), "make transformer-engine GPU=1"):
            assert words in line
        assert install.kept == []
    install()
    _, told = install(UNLOADABLE="1")
    assert f"remove {install.kept[0]}" in told


def test_nodes_that_build_at_once_keep_a_whole_wheel(tmp_path: Path) -> None:
    install = Builder(tmp_path)
    install()
    (wheel,) = install.kept
    wheel.rename(wheel.with_name(".other-7"))  # another node is still copying
    calls, _ = install()
    assert any("pip wheel" in line for line in calls)
    assert [path.read_text() for path in install.kept] == ["whole\n"]


# ---------------------------------------------------------------- the driver


@pytest.mark.parametrize(
    ("driver", "newest", "refused"),
    [("535.183.01", 12020, True), ("580.1", None, False), ("575.57", 12090, True), (None, None, False)],
)
def test_which_drivers_are_refused(driver: str | None, newest: int | None, refused: bool) -> None:
    assert (GPU["refusal"](GPU["Facts"](driver, "", newest), 13) is not None) == refused


# ---------------------------------------------------------------- nvcc


def test_nvcc_is_found_in_the_packages_of_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda in ("cu12", "cu13"):
        program(tmp_path / "site" / "nvidia" / cuda / "bin" / "nvcc", "true")
    on_path = program(tmp_path / "bin" / "nvcc", "true")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    packaged = [path for path in build.compilers() if tmp_path in path.parents]
    assert packaged == [tmp_path / "site/nvidia/cu13/bin/nvcc", tmp_path / "site/nvidia/cu12/bin/nvcc", on_path]
    chosen = program(tmp_path / "cuda" / "bin" / "nvcc", "true")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert build.compilers()[0] == chosen


# ---------------------------------------------------------------- torch


@pytest.mark.parametrize(
    ("version", "cuda", "nccl", "told"),
    [
        (f"{VERSION}+cu130", "13.0", PINS["nvidia-nccl-cu13"], None),
        (f"{VERSION}+cu126", "12.6", PINS["nvidia-nccl-cu13"], "built for CUDA 12.6"),
        (f"{VERSION}+cpu", None, PINS["nvidia-nccl-cu13"], "built for the CPU"),
        ("2.13.0+cu130", "13.0", PINS["nvidia-nccl-cu13"], "got 2.13.0+cu130"),
        (VERSION, "13.0", None, "nvidia-nccl-cu13: got none"),
    ],
)
def test_which_torch_is_refused(version: str, cuda: str | None, nccl: str | None, told: str | None) -> None:
    why = TORCH["refusal"](version, cuda, nccl, PINS)
    assert why is None if told is None else told in why
