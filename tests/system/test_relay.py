"""A run over hosts with a network between them, whose engines pass on to each other what they receive; one of the hosts dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.network.hosts import Host, Wire, missing, network
from tests.system.runs import ONE_RANK, REPOSITORY, SMALL, logs, metrics, provide, wait_for
from tests.system.test_nodes import ROOM

pytestmark = [pytest.mark.system, pytest.mark.skipif(bool(why := missing()), reason=why)]
SECONDS = 600.0
OPTIONS = (
    "engines.join=true",
    "sync.verify_every=1",
    "sync.delta=auto",
    "cluster.network=10.77.0.0/24",
    "cluster.heartbeat_timeout_s=4",
    "engines.start_timeout_s=600",
    "trainer.timeout_s=600",
    "engines.hang_timeout_s=300",
    "run.steps=2000",
    ROOM,
)


def test_two_engines_share_what_one_trainer_sends_once_until_a_host_is_lost(tmp_path: Path) -> None:
    """Every version is checked on both engines. The one that is left gets its versions from the trainer."""
    run = tmp_path / "run"
    settings = ["examples/demo.yaml", f"run.dir={run}", f"model.path={provide(tmp_path / 'model')}", *SMALL, *ONE_RANK, *OPTIONS]
    trainer = ["torch.distributed.run", "--nnodes=1", "--nproc-per-node=1", "--master-port=29500", "-m", "asyncmoe.trainer", *settings]
    with network(3, Wire(rate=1_000_000_000)) as hosts:
        engines = [_start(host, tmp_path, f"engine{i}", "asyncmoe", "engine", *settings) for i, host in enumerate(hosts[1:])]
        controller = _start(hosts[0], tmp_path, "controller", "asyncmoe", "rollout", *settings)
        trained = _start(hosts[0], tmp_path, "trainer", *trainer)

        def said() -> str:
            return "".join(path.read_text()[-3000:] for path in sorted(tmp_path.glob("*.log"))) + logs(run)

        def steps() -> int:
            return len(metrics(run))

        everyone = [*engines, controller, trained]

        def go_on(relayed: bool, more: int) -> bool:
            """Until the newest meeting relays, or not, and for so many steps after that."""
            met = wait_for(lambda: _relayed(tmp_path)[-1:] == [relayed] or trained.poll() is not None, SECONDS)
            until = steps() + more
            return met and wait_for(lambda: steps() >= until or trained.poll() is not None, SECONDS) and trained.poll() is None

        assert go_on(relayed=True, more=6), said()
        assert all(one.poll() is None for one in everyone), said()
        hosts[2].die()
        assert go_on(relayed=False, more=4), said()
        controller.send_signal(signal.SIGKILL)


def _start(host: Host, folder: Path, name: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(REPOSITORY)}
    with (folder / f"{name}.log").open("wb") as log:
        command = ["env", "-C", str(REPOSITORY), sys.executable, "-m", module, *arguments]
        return host.start(command, environment, log, subprocess.STDOUT)


def _relayed(folder: Path) -> list[bool]:
    """Of each meeting, whether its engines relay."""
    said = (folder / "trainer.log").read_text() if not os.path.exists(folder / "run/logs/trainer.log") else ""
    said += "".join(path.read_text() for path in sorted((folder / "run" / "logs").glob("trainer*.log")))
    return ["pass on" in line for line in re.findall(r"weights travel over gloo to .*", said)]
