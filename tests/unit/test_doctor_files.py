"""What the doctor sees of run directories and models: disks that are full, files that are cut short, what a configuration asks for."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import asyncmoe
from asyncmoe import config as configuration
from asyncmoe import installed
from asyncmoe.doctor.facts import RunFacts
from asyncmoe.doctor.probes import config_probe, machine, rollout_code
from asyncmoe.errors import UserError

ROOT = Path(asyncmoe.__file__).resolve().parent.parent


def test_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    found = machine.disk(tmp_path / "runs" / "new", 2)
    assert (found.probed, found.checkpoints, found.trouble) == (str(tmp_path), 2, None)
    assert found.free_bytes > 0
    assert found.kind != "unknown"
    assert found.ahead_s is not None
    assert abs(found.ahead_s) < 60
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written() -> None:
    found = machine.disk(Path("/proc/asyncmoe"), 0)
    assert found.kind == "proc"
    assert str(found.trouble).startswith("making a directory: ")


def test_the_last_of_the_longest_mount_points_wins() -> None:
    mounts = "/dev/a / ext4 rw 0 0\nfs /share lustre rw 0 0\nfs /sharp nfs4 rw 0 0\nx /a\\040b tmpfs rw 0 0\ny /share overlay rw 0 0\n"
    kinds = {path: machine.kind_of(Path(path), mounts) for path in ("/home", "/share", "/share/run", "/sharp", "/a b/c", "/shared")}
    assert kinds == {"/home": "ext4", "/share": "overlay", "/share/run": "overlay", "/sharp": "nfs4", "/a b/c": "tmpfs", "/shared": "ext4"}


LOOK = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from asyncmoe.doctor.probes import machine
print(json.dumps(asdict(machine.disk(Path(sys.argv[1]), 0))))
"""
MOUNT = """
d=$(mktemp -d)
trap 'umount "$d" 2>/dev/null; rmdir "$d"' EXIT
mount -t tmpfs -o "$2" tmpfs "$d" || exit 77
(cd "$d" && $3)
"$0" -c "$1" "$d"
"""


def on_a_disk_of_its_own(options: str, fill: str) -> dict[str, object]:
    """`machine.disk` on a new file system in a mount namespace, where the system lets us make one."""
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNT, sys.executable, LOOK, options, fill],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no namespace to mount in")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")
def test_a_full_disk_and_one_that_is_read_only() -> None:
    full = on_a_disk_of_its_own("size=256k", "dd if=/dev/zero of=full bs=4k count=60")
    assert full["trouble"] == "writing a file: No space left on device"
    assert full["kind"] == "tmpfs"
    assert int(str(full["free_bytes"])) <= 1 << 18
    assert on_a_disk_of_its_own("ro", "true")["trouble"] == "making a directory: Read-only file system"


DEMO = ROOT / "examples" / "demo.yaml"


def test_code_of_ones_own_is_tried_and_a_bad_family_is_not_called_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ends_all.py").write_text("import os\nos._exit(4)\n")
    values = {"run": {"dir": "run", "steps": 1}, "task": {"kind": "arithmetic"}, "model": {"path": "none", "family": "ends_all:F"}}
    run = config_probe.with_files(RunFacts("x"), configuration.parse(values))
    assert run.own == {"model.family": "ends_all:F"}
    said = "model.family: got ends_all:F: the process that tried it ended with status 4, expected code that returns, and does not end the"
    assert run.own_trouble == f"{said} process"
    assert run.model is not None
    assert run.model.trouble == "it cannot be looked at with model.family ends_all:F: see the line own-code"


def test_code_for_rollouts_that_is_not_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(installed, "has", lambda module: False)
    (tmp_path / "here.py").write_text("raise SystemExit(1)")
    values: dict[str, Any] = {"run": {"dir": "run", "steps": 1}, "model": {"path": "none"}}
    adapter = "asyncmoe.rollout.adapters.verifiers:rollout"
    values |= {"task": {"kind": "here:Sums"}, "scoring": {"scorer": "nothere:y"}, "environment": {"kind": "openai", "agent": adapter}}
    config = configuration.parse(values)
    assert rollout_code.named(config) == {"task.kind": "here:Sums", "scoring.scorer": "nothere:y", "environment.agent": adapter}
    with pytest.raises(UserError) as caught:
        rollout_code.check(config)
    scorer, agent = str(caught.value).splitlines()
    assert scorer.startswith("scoring.scorer: got nothere:y, and no module nothere, expected a module in this directory")
    assert agent.startswith("environment.agent: got no module verifiers, expected the extra verifiers; run: ")
    tools = {"names": ["here:f", "calculator", "nothere:g"], "mcp": {"s": {"command": "sh"}}}
    config = configuration.parse(
        {**values, "scoring": {}, "task": {"kind": "arithmetic"}, "environment": {"kind": "tools", "tools": tools}}
    )
    assert rollout_code.named(config) == {"environment.tools.names": "here:f, nothere:g"}
    with pytest.raises(UserError) as caught:
        rollout_code.check(config)
    function, server = str(caught.value).splitlines()
    assert function.startswith("environment.tools.names: got nothere:g, and no module nothere")
    assert server.startswith("environment.tools.mcp: got no module mcp, expected the extra mcp; run: ")


def test_what_a_configuration_asks(tmp_path: Path) -> None:
    from asyncmoe.config.model import MadeModel
    from asyncmoe.models.make import make_model

    shape = MadeModel(layers=2, hidden=64, experts=8, experts_per_token=2, expert_hidden=64)
    make_model(tmp_path / "model", shape, seed=0)
    settings = [f"model.path={tmp_path / 'model'}", f"run.dir={tmp_path / 'run'}", "engines.count=2", "rollout.max_concurrent=8"]
    config = configuration.load(DEMO, settings)
    found = config_probe.model(config)
    stored = (tmp_path / "model" / "model.safetensors").stat().st_size
    assert (found.trouble, found.family) == (None, "qwen3_moe")
    assert found.weights_bytes is not None
    assert found.parameters is not None
    assert 0 <= stored - found.weights_bytes < 0.1 * stored, "all that the file holds but its header"
    assert found.parameters == found.weights_bytes // 4
    (tmp_path / "model/tokenizer.json").write_text("{")
    assert "got tokenizer.json, not whole" in str(config_probe.model(config).trouble)
    (tmp_path / "model/tokenizer.json").unlink()
    assert "got no vocabulary" in str(config_probe.model(config).trouble)
    adapted = config_probe.model(configuration.load(DEMO, [*settings, "train=lora"]))
    assert adapted.parameters is not None
    assert 0 < adapted.parameters < found.parameters
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        _, run = config_probe.read(DEMO, [*settings, f"engines.port={port}"])
    assert run is not None
    assert (run.connections, run.keep_checkpoints, run.network) == (8, 2, "loopback")
    assert [(entry.key, entry.number) for entry in run.ports] == [("engines.port", port), ("engines.port", port + 1)]
    assert run.ports[0].trouble == "Address already in use"
    run = config_probe.with_files(run, config)
    assert run.checkpoint_bytes == 16 * found.parameters
    assert run.shm_bytes == 2 * 2 * found.weights_bytes
    assert run.disk is not None
    assert run.disk.trouble is None
    broken = configuration.load(DEMO, [*settings, "trainer.tp=2", "trainer.ep=1", "engines.tp=3", "engines.ep=1"])
    assert "engines.tp: got 3" in str(config_probe.model(broken).trouble)
