"""`asyncmoe doctor` on this machine, and the checks that look for themselves."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import asyncmoe
from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.doctor import command, compare, finding, host, nvidia, run
from asyncmoe.doctor.planned import planned
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits

ROOT = Path(asyncmoe.__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "demo.yaml"


def demo(*overrides: str) -> Config:
    return configuration.load(DEMO, overrides)


@pytest.mark.usefixtures("engines_here")
def test_the_report_of_this_machine(tmp_path: Path) -> None:
    """A whole one, with a configuration whose first engine port somebody has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = [str(DEMO), f"run.dir={tmp_path / 'run'}", f"engines.port={server.getsockname()[1]}"]
        line = [sys.executable, "-m", "asyncmoe", "doctor", *words, "--json"]
        done = subprocess.run(line, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300)
    (tmp_path / "report.json").write_text(done.stdout)
    report = compare.read(tmp_path / "report.json")
    assert (done.returncode, report.host) == (1, socket.gethostname())
    assert report.versions["torch of the trainer's Python"].startswith("2.")
    found = {name: one.state for name, one in report.checks.items()}
    assert (found.pop("ports"), report.checks["ports"].found[-22:]) == ("error", "Address already in use")
    for name in ("packages", "torch", "engine-python", "sglang", "configuration", "network"):
        assert found[name] == "ok", report.checks[name]
    assert all(one.hint for one in report.checks.values() if one.state in ("warning", "error"))
    if not nvidia.look().present:
        assert {found[name] for name in ("cuda", "gpus", "placement", "gpu-memory", "nccl")} == {"not here"}
    assert json.loads(done.stdout)["checks"]["run-dir"]["found"].endswith("; a checkpoint takes about 4.61 MB")


def test_each_line_has_its_state_and_its_way_out() -> None:
    shown = StringIO()
    checks = {"torch": finding.ok("2.9"), "sglang": finding.error("0.5.22", "install it", "0.5.23")}
    command.show("laptop", checks, Console(file=shown, width=40))
    torch, sglang, hint, end = shown.getvalue().splitlines()
    assert torch.split() == ["ok", "torch", "2.9"]
    assert sglang == "error     sglang              0.5.22, expected 0.5.23"
    assert hint.strip() == "-> install it"
    assert end == "laptop: ok: 1, warning: 0, error: 1, not here: 0"


def test_a_configuration_is_checked_as_config_validate_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, found = run.configuration([str(DEMO), "run.stepz=3"])
    assert (config, found.state) == (None, "error")
    assert "run.stepz: got an unknown key" in found.found
    assert "error: " not in found.found
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config, found = run.configuration([str(DEMO), "scoring.scorer=nothere:y"])
    assert config is not None
    assert found.found.startswith("scoring.scorer: got nothere:y, and no module nothere, expected a module in this directory")
    monkeypatch.setattr(run, "_VALIDATE_S", 0.01)
    config, found = run.configuration([str(DEMO)])
    assert (config, "did not end within" in found.found, found.state) == (None, True, "error")
    assert run.configuration([])[1].state == "not here"


def test_ports_and_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        found = run.ports(demo(f"cluster.port={taken}"))
    assert (found.state, found.found) == ("error", f"cluster.port {taken}: Address already in use")
    assert "or choose another" in (found.hint or "")
    assert run.ports(demo(f"cluster.port={taken}")).found == f"cluster.port {taken} can be listened on"
    assert run.ports(demo()).state == "ok"
    assert run.network(demo()).state == "ok"
    found = run.network(demo("cluster.network=ib7"))
    assert (found.state, found.found, "an interface or a network" in found.line) == ("error", "cluster.network: 'ib7'", True)


def test_a_run_directory(tmp_path: Path) -> None:
    config = demo(f"run.dir={tmp_path / 'runs' / 'new'}", "trainer.keep_checkpoints=2")
    made = planned(config)
    assert made is not None
    assert run.run_dir(config, made).state == "ok"
    mounts, room = tmp_path / "mounts", os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    mounts.write_text("/dev/a / ext4 rw 0 0\n")
    several = config.model_copy(update={"cluster": config.cluster.model_copy(update={"network": "hostname"})})
    assert run.run_dir(several, made, mounts).found.endswith("; other machines may not see it")
    mounts.write_text("/dev/a / lustre rw 0 0\n")
    assert run.run_dir(several, made, mounts).state == "ok"
    layers = made.hf["num_hidden_layers"] * room // run._checkpoint_bytes(made)
    for factor, state in ((2, "error"), (0.5, "warning")):
        found = run.run_dir(config, replace(made, hf={**made.hf, "num_hidden_layers": max(1, int(layers * factor))}), mounts)
        assert (found.state, "keep_checkpoints" in (found.hint or "")) == (state, True), found
    assert list(tmp_path.iterdir()) == [mounts]


def test_the_last_of_the_longest_mount_points_wins() -> None:
    mounts = "/dev/a / ext4 rw 0 0\nfs /share lustre rw 0 0\nfs /sharp nfs4 rw 0 0\nx /a\\040b tmpfs rw 0 0\ny /share overlay rw 0 0\n"
    kinds = {path: run.kind_of(Path(path), mounts) for path in ("/home", "/share", "/share/run", "/sharp", "/a b/c", "/shared")}
    assert kinds == {"/home": "ext4", "/share": "overlay", "/share/run": "overlay", "/sharp": "nfs4", "/a b/c": "tmpfs", "/shared": "ext4"}


def test_limits_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.shm(tmp_path / "none").state == "error"
    room = os.statvfs(tmp_path)
    monkeypatch.setattr(host, "_SHM_BYTES", room.f_bavail * room.f_frsize * 2)
    assert (host.shm(tmp_path).state, "--shm-size" in (host.shm(tmp_path).hint or "")) == ("warning", True)
    for limits, state, hint in (
        ((1 << 20, 1 << 20), "ok", ""),
        ((1024, 1 << 20), "warning", "ulimit -n"),
        ((1024, 1024), "warning", "nofile"),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        found = host.open_files(demo())
        assert (found.state, hint in (found.hint or "")) == (state, True)


def test_infiniband(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.infiniband(tmp_path).state == "not here"
    for name, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        (tmp_path / name / "ports" / "1").mkdir(parents=True)
        (tmp_path / name / "ports" / "1" / "state").write_text(state)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 16, 1 << 16))
    assert (host.infiniband(tmp_path).state, "65.5 kB" in host.infiniband(tmp_path).found) == ("error", True)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    found = host.infiniband(tmp_path)
    assert (found.state, found.found) == ("warning", "mlx5_0:1 is ACTIVE, mlx5_1:1 is DOWN")
    assert (found.hint or "").endswith("in NCCL_IB_HCA")


def test_the_sandbox_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(limits: PythonLimits, section: SandboxSection) -> None:
        raise ConfigError("environment.sandbox", got="no user namespace", expected="one", hint="as root: sysctl")

    monkeypatch.setattr(host, "python_tool", refuses)
    assert host.sandbox() == finding.warning("the default sandbox is refused: no user namespace", "for the tool python: as root: sysctl")
