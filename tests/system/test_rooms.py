"""How many rooms of the package a weight version passes, from the optimizer step to the engine's parameter, in a real run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.runs import ONE_RANK, run

pytestmark = pytest.mark.system
MOST = 12


def room(module: str) -> str:
    """The folder of `asyncmoe` that a module is in; the modules of `asyncmoe` itself, such as `errors.py`, are one room."""
    return module.split("/")[0] if "/" in module else "."


def test_a_version_passes_few_rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tmp_path / "rooms"
    found.mkdir()
    monkeypatch.setenv("ASYNCMOE_ROOMS", str(found))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "trace_rooms"), prepend=":")
    run(tmp_path / "run", "warmup.steps=1", "run.steps=2", *ONE_RANK)
    called = sorted({tuple(line.split()) for file in found.iterdir() for line in file.read_text().splitlines()})
    assert ("weights/receiver/worker.py", "obey") in called, "the workers of the engines are traced"
    rooms = sorted({room(module) for module, _ in called})
    print(*(f"{one}: {len({module for module, _ in called if room(module) == one})} modules" for one in rooms), sep="\n")
    assert len(rooms) <= MOST, rooms
