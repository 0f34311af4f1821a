"""`asyncmoe doctor` on this machine, and the checks that look for themselves."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from doctor_machines import NODE, but

import asyncmoe
from asyncmoe.doctor import infiniband, nvidia, run
from asyncmoe.doctor.examination import Report
from asyncmoe.doctor.planned import planned
from asyncmoe.plan import disk
from tests.configs import DEMO, demo

ROOT = Path(asyncmoe.__file__).resolve().parent.parent


@pytest.mark.usefixtures("engines_here")
def test_the_report_of_this_machine(tmp_path: Path) -> None:
    """A complete report, with a configuration whose first engine port is in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = [str(DEMO), f"run.dir={tmp_path / 'run'}", f"engines.port={server.getsockname()[1]}"]
        line = [sys.executable, "-m", "asyncmoe", "doctor", *words, "--json"]
        done = subprocess.run(line, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300)
    report = msgspec.json.decode(done.stdout, type=Report)
    assert (done.returncode, report.host) == (1, socket.gethostname())
    found = {name: one.state for name, one in report.checks.items()}
    assert (found.pop("ports"), report.checks["ports"].found[-22:]) == ("error", "Address already in use")
    for name in ("packages", "torch", "engine-python", "sglang", "configuration", "network"):
        assert found[name] == "ok", report.checks[name]
    assert all(one.hint for one in report.checks.values() if one.state in ("warning", "error"))
    if not nvidia.look().present:
        assert {found[name] for name in ("cuda", "gpus", "placement", "gpu-memory", "nccl")} == {"not here"}
    assert json.loads(done.stdout)["checks"]["run-dir"]["found"].endswith("; a checkpoint takes about 4.61 MB")


@pytest.mark.skipif(shutil.which("jq") is None, reason="no jq")
def test_the_command_for_all_nodes_names_the_one_without_libibverbs(tmp_path: Path) -> None:
    for node in (NODE, but(NODE, host="node02", nics__listed=()), but(NODE, host="node03")):
        report = Report(node.host, {"infiniband": infiniband.infiniband(node.nics)})
        (tmp_path / f"doctor-{node.host}.json").write_bytes(msgspec.json.encode(report))
    script = f"grep '^jq ' {ROOT}/docs/cluster.md | bash"
    told = subprocess.check_output(["bash", "-c", script], cwd=tmp_path, text=True, timeout=60).splitlines()
    assert [line.partition(" ")[0] for line in told] == ["node02"]


def test_a_configuration_is_checked_as_config_validate_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, found = run.configuration([str(DEMO), "run.stepz=3"])
    assert (config, found.state) == (None, "error")
    assert "run.stepz: got an unknown key" in found.found
    assert "error: " not in found.found
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config, found = run.configuration([str(DEMO), "scoring.scorer=nothere:y"])
    assert found.found.startswith("scoring.scorer: got nothere:y: ModuleNotFoundError")
    monkeypatch.setattr(run, "_VALIDATE_S", 0.01)
    config, found = run.configuration([str(DEMO)])
    assert (config, "did not end within" in found.found, found.state) == (None, True, "error")
    assert run.configuration([])[1].state == "not here"


def test_addresses() -> None:
    assert run.ports(demo()).state == "ok"
    assert run.network(demo()).state == "ok"
    found = run.network(demo("cluster.network=ib7"))
    assert (found.state, found.found) == ("error", "cluster.network: 'ib7'")


def test_a_run_directory(tmp_path: Path) -> None:
    config = demo(f"run.dir={tmp_path / 'runs' / 'new'}", "trainer.keep_checkpoints=2")
    made = planned(config)
    assert run.run_dir(config, made).state == "ok"
    room = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    layers = made.hf["num_hidden_layers"] * room // disk.checkpoint_bytes(config, made.hf)
    for factor, state in ((2, "error"), (0.5, "warning")):
        found = run.run_dir(config, replace(made, hf={**made.hf, "num_hidden_layers": max(1, int(layers * factor))}))
        assert (found.state, "keep_checkpoints" in (found.hint or "")) == (state, True), found
    assert not [*tmp_path.iterdir()]
