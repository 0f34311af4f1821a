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
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(FOLDER, tmp_path / "requirements")
    return tmp_path


def commands(tree: Path, *arguments: str) -> list[str]:
    done = run("make", "--dry-run", "--no-print-directory", "setup", *arguments, cwd=tree)
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
