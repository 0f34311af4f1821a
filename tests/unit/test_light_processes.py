"""Small processes, which a run starts often, load no package that they do not use: it would be most of their start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import asyncmoe

HEAVY = {"aiohttp", "numpy", "pydantic", "torch", "yaml"}
USERS_CODE = f"""
import sys

def loaded():
    return " ".join(sorted({{name.partition(".")[0] for name in sys.modules}} & {HEAVY!r}))

def score(prompt, response, answer):
    return {{"reward": 1.0, "why": loaded()}}
"""


def output(directory: Path, arguments: Sequence[str], given: Sequence[object] = ()) -> list[str]:
    """Lines that a Python process prints; it finds the modules in `directory`."""
    path = os.pathsep.join((str(Path(asyncmoe.__file__).parent.parent), str(directory)))
    lines = "".join(json.dumps(one) + "\n" for one in given)
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *arguments], input=lines, env=environment, check=True, capture_output=True, text=True, timeout=120
    ).stdout.splitlines()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "users_code.py").write_text(USERS_CODE)
    return tmp_path


def test_a_scorers_process_loads_nothing_heavy(directory: Path) -> None:
    given = [{"target": "users_code:score", "options": {}}, {"prompt": "", "response": "", "answer": ""}]
    started, scored = output(directory, ["-m", "asyncmoe.rollout.process_worker", "asyncmoe.rollout.scoring.workers:serve"], given)
    assert json.loads(started) == ""
    assert json.loads(scored) == {"value": {"reward": 1.0, "why": ""}}


@pytest.mark.parametrize(
    "module",
    [
        "asyncmoe.rollout.scoring",
        "asyncmoe.rollout.scoring.mathematics",
        "asyncmoe.launch.slurm.task",
        "asyncmoe.launch.torchrun",
        "asyncmoe.telemetry.loggers",
    ],
)
def test_a_module_loads_nothing_heavy(tmp_path: Path, module: str) -> None:
    assert output(tmp_path, ["-c", f"import sys, {module}; print(*{HEAVY!r} & sys.modules.keys())"]) == [""]
