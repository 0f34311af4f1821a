"""`asyncmoe doctor` as it is run, on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import asyncmoe
from asyncmoe.doctor.examination import CHECKS
from asyncmoe.doctor.probes import nvidia
from asyncmoe.doctor.report import read

ROOT = Path(asyncmoe.__file__).resolve().parent.parent


def doctor(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "asyncmoe", "doctor", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.usefixtures("engines_here")
def test_the_report_of_this_machine(tmp_path: Path) -> None:
    """A whole one, with a configuration whose first engine port somebody has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"engines.port={server.getsockname()[1]}"
        status, printed, _ = doctor(str(ROOT / "examples/demo.yaml"), f"run.dir={tmp_path / 'run'}", taken, "--json")
    report: dict[str, Any] = json.loads(printed)
    lines = {line["name"]: line for line in report["checks"]}
    assert list(lines) == list(CHECKS)
    assert all(set(line) == {"name", "state", "found", "hint"} and line["found"] for line in lines.values())
    assert {line["state"] for line in lines.values()} <= {"ok", "warning", "error", "not here"}
    assert all(line["hint"] for line in lines.values() if line["state"] in ("warning", "error"))
    assert (status, lines["ports"]["state"]) == (1, "error")
    assert "already in use" in lines["ports"]["found"]
    for name in ("python", "torch", "megatron-core", "packages", "engine-python", "sglang", "loopback", "configuration", "model"):
        assert lines[name]["state"] == "ok", lines[name]
    assert lines["run-dir"]["state"] in ("ok", "warning"), lines["run-dir"]
    if not nvidia.look().present:
        for name in ("driver", "cuda", "gpus", "nvlink", "nccl"):
            assert lines[name]["state"] == "not here", lines[name]
            assert "no GPU" in lines[name]["found"]
        assert "runs on the CPU work without" in lines["gpus"]["found"]
    facts = report["machine"]
    assert facts["trainer"]["torch"]["version"].startswith("2.")
    assert facts["host"] == socket.gethostname()
    (tmp_path / "report.json").write_text(printed)
    same = str(tmp_path / "report.json")
    assert read(Path(same)).machine.run is not None
    assert doctor("--compare", same, same) == (0, "2 nodes have the same versions\n", "")


def test_files_that_are_no_reports_are_one_line(tmp_path: Path) -> None:
    status, printed, errors = doctor("--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert (status, printed) == (2, "")
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
