"""Packages installed with GPU=1: the recorded resolutions of pip agree with each other, with the pins, and with SGLang's requirements."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"
RESOLVE: dict[str, Any] = runpy.run_path(str(FOLDER / "resolve.py"))
PYTHONS = ("cp311", "cp312")
LISTS = [f"{name}-gpu-{tag}" for name in ("trainer", "engine") for tag in PYTHONS]
ONLY_SOURCE = {"transformer-engine-torch"}
"""pip resolves wheels only, and this package has none: requirements/transformer_engine.sh builds it."""


def versions(path: Path) -> dict[str, str]:
    """Those of a list or of constraints."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(), re.MULTILINE))


def resolved(name: str) -> dict[str, str]:
    return versions(FOLDER / "resolved" / f"{name}.txt")


def names(file: str) -> set[str]:
    """Packages that a file of requirements asks for."""
    lines = [line for line in (FOLDER / file).read_text().splitlines() if line and not line.startswith("#")]
    return {RESOLVE["normalised"](Requirement(line).name) for line in lines}


PINS = versions(FOLDER / "gpu.txt")


@pytest.mark.parametrize("name", LISTS)
def test_a_list_holds_all_that_is_asked_for_at_the_pinned_versions(name: str) -> None:
    found = resolved(name)
    files = RESOLVE["ENVIRONMENTS"][name.split("-")[0]]
    assert {package for file in files for package in names(file)} <= set(found)
    assert {package: found[package] for package in PINS if package in found} == {p: v for p, v in PINS.items() if p in found}
    for file in files:
        exact = {RESOLVE["normalised"](package): version for package, version in versions(FOLDER / file).items()}
        assert {package: found[package] for package in exact} == exact, file
    absent = set(PINS) - set(found)
    assert absent <= (ONLY_SOURCE if name.startswith("trainer") else {p for p in PINS if p.startswith("transformer-engine")})


def test_the_pins_are_those_sglang_asks_for() -> None:
    """The SGLang that is installed here, on the CPU, declares the same as on a GPU: this torch, and CUDA 13 in several packages."""
    site = next((ROOT / ".venv-engine").glob("lib/python3*/site-packages"), None)
    if site is None:
        pytest.skip("no .venv-engine")
    (sglang,) = importlib.metadata.distributions(name="sglang", path=[str(site)])
    assert f"sglang=={sglang.version}" in (FOLDER / "engine-gpu.txt").read_text().splitlines()
    asked = [Requirement(line) for line in sglang.requires or []]
    here = [wanted for wanted in asked if wanted.marker is None or wanted.marker.evaluate({"extra": ""})]
    assert [str(wanted.specifier) for wanted in here if wanted.name == "torch"] == [f"=={PINS['torch']}"]
    only_13 = {wanted.name for wanted in here if "cu13" in wanted.extras or wanted.name.endswith("-cu13")}
    assert len(only_13) >= 3, "there may be a set for CUDA 12 now: see requirements/gpu.txt and docs/troubleshooting.md"


@pytest.mark.parametrize(("name", "files"), RESOLVE["HASHED"].items())
def test_lists_with_hashes_hold_what_is_pinned(name: str, files: tuple[str, ...]) -> None:
    """A pin that changes without its hash would be installed on other machines only."""
    pinned: dict[str, str] = {}
    for file in files:
        pinned |= {RESOLVE["normalised"](package): version for package, version in versions(FOLDER / file).items()}
    lists = list((FOLDER / "hashed").glob(f"{name}-cpu-*.txt"))
    assert lists
    for path in lists:
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==\S+ --hash=sha256:[0-9a-f]{64}", line)] == []
        assert dict(line.split(" ")[0].split("==") for line in lines) == pinned
        assert "torch" not in pinned, "its build is chosen by torch.sh"
