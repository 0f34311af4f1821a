"""The steps of `make setup GPU=1`, their order, and its refusals, with stand-ins for driver, nvcc, pip's index and torch."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping
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
    assert any("--editable" in line for line in commands(tree, "GPU=1", target=".venv/.transformer-engine")), "one pip at a time"
    assert [("--clear" in line) for line in lines if "-m venv" in line] == [before != "fresh"] * 2, "CPU builds do not stay beside others"


def test_a_layer_of_the_image_builds_transformer_engine_before_there_are_sources(tmp_path: Path) -> None:
    before, _, _ = (ROOT / "docker" / "cuda.Dockerfile").read_text().partition("RUN make ")
    for name in (word for line in before.splitlines() if line.startswith("COPY ") for word in line.split()[1:-1]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    lines = commands(tmp_path, "GPU=1", target="transformer-engine")
    assert [line for line in lines if "transformer_engine.sh" in line or "--editable" in line] == [lines[-2]]
    for script in ("requirements/check_gpu.py", "asyncmoe/build.py"):
        assert "Traceback" not in run(sys.executable, "-P", script, cwd=tmp_path).stderr


# ---------------------------------------------------------------- Transformer Engine


def build_engine(folder: Path, torch: str = "2.14.1", fails: str = "nothing") -> tuple[str, list[Path], str]:
    """The commands that pip gets, the wheels that are kept, and the line for the user, with a pip that builds at once.

    Args:
        fails: a part of the command that fails.
    """
    (folder / "torch.py").write_text(f"class version: cuda = '13.0'\n__version__ = '{torch}'\n")
    python = f'''case "$*" in *" key") exec {sys.executable} "$@" ;; *"{fails}"*) echo "error: g++ failed"; exit 1 ;; esac
echo "$*"; [[ "$*" != *"pip wheel"* ]] || echo whole > "${{@:(-2):1}}/transformer_engine_torch.whl"'''
    env = {"PYTHONPATH": str(folder), "ASYNCMOE_WHEELS": str(folder / "wheels")}
    done = run(FOLDER / "transformer_engine.sh", program(folder / "python", python), folder / "log", env=env)
    return (folder / "log").read_text(), sorted(folder.glob("wheels/*/*.whl")), done.stderr


def test_a_wheel_is_built_once_for_each_torch(tmp_path: Path) -> None:
    first, (wheel,), _ = build_engine(tmp_path)
    assert "--no-cache-dir" in first[first.index("pip wheel") :], "pip's own cache does not know torch's version"
    again, _, told = build_engine(tmp_path)
    assert ("pip wheel" in again, f"--force-reinstall {wheel}\n" in again, told) == (False, True, "")
    assert len(build_engine(tmp_path, torch="2.15.0")[1]) == 2
    wheel.rename(wheel.with_name(".other-7"))  # another node is still copying
    assert [path.read_text() for path in build_engine(tmp_path)[1]] == ["whole\n"] * 2


def test_a_wheel_that_does_not_work_is_named_and_not_kept(tmp_path: Path) -> None:
    key = f"{PINS['transformer-engine']}-torch-2.14.1-cuda-13.0-cpython-3"
    for fails in ("pip wheel", "check_"):
        _, kept, told = build_engine(tmp_path, fails=fails)
        assert (kept, f"(error: g++ failed), expected {key}" in told) == ([], True), told
    _, (wheel,), _ = build_engine(tmp_path)
    assert f"remove {wheel}" in build_engine(tmp_path, fails="check_")[2]


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
