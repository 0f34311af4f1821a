"""`launch: ray` on a Ray cluster of three nodes, each with an address of this machine's for itself."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.system.runs import Command, demo, further, logs, marked_pids, metrics, nccl_settings, refused, silent_engines, start, wait_for

pytestmark = [pytest.mark.system, pytest.mark.thorough]
HEAD, *OTHERS = "127.0.0.2", "127.0.0.3", "127.0.0.4"
ON_RAY = ("launch=ray", "cluster.trainer_nodes=2")


class Nodes:
    """A Ray cluster that is started in the foreground: it ends with its processes, and no other Ray of this machine is touched."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._nodes: dict[str, Command] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a Unix socket's path has 107 characters at most
        with socket.socket() as probe:
            probe.bind((HEAD, 0))
            self.address = f"{HEAD}:{probe.getsockname()[1]}"

    def start(self) -> None:
        """A head with two CPUs, and two other nodes with one, of which the last has a setting of NCCL of its own."""
        own = (f"--temp-dir={self._directory}", "--include-dashboard=false", "--disable-usage-stats", "--num-cpus=2")
        self._start(HEAD, "--head", f"--port={self.address.partition(':')[2]}", *own)
        for address in OTHERS:
            own = {"NCCL_P2P_LEVEL": "SYS"} if address == OTHERS[-1] else {}
            self._start(address, f"--address={self.address}", "--num-cpus=1", **own)

    def lose(self, address: str) -> None:
        """End all processes of a node at once, like a power cut."""
        node = self._nodes.pop(address)
        for process in psutil.Process(node.process.pid).children(recursive=True):
            process.kill()
        node.process.kill()

    def end(self) -> None:
        for node in reversed(self._nodes.values()):
            node.process.terminate()
        left = [line for node in self._nodes.values() if not node.gone() for line in node.alive()]
        shutil.rmtree(self._directory)
        assert not left

    def _start(self, address: str, *arguments: str, **own: str) -> None:
        """With no port that is always the same. One after the other: two that share a directory take the same names in it otherwise."""
        free = ("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0", "--object-store-memory=80000000")
        words = ("start", "--block", f"--node-ip-address={address}", *free, *arguments)
        environment = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1", **own}
        log = self._logs / address
        node = self._nodes[address] = Command(*words, module="ray.scripts.scripts", log=log, **environment)
        assert wait_for(lambda: "Ray runtime started." in log.read_text() or node.process.poll() is not None, 120), log.read_text()
        assert node.process.poll() is None, log.read_text()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """What runs meanwhile finds a cluster by RAY_ADDRESS, has its token, and gives all nodes a setting of NCCL."""
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text(secrets.token_hex(32))
    nodes = Nodes(tmp_path_factory.mktemp("ray"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        try:
            nodes.start()
            patch.setenv("RAY_ADDRESS", nodes.address)
            patch.setenv("NCCL_P2P_LEVEL", "LOC")
            yield nodes
        finally:
            nodes.end()


def test_too_few_nodes_are_counted(cluster: Nodes, tmp_path: Path) -> None:
    line = refused(*demo(tmp_path / "run", "launch=ray", "trainer.ranks=4", "cluster.trainer_nodes=4", "engines.start_timeout_s=0.1"))
    assert line.startswith("Ray cluster: got nodes with 2 CPUs, 1 CPU, 1 CPU; free: 4 CPUs, expected 5 nodes: 1 CPU for controller")


def test_a_run_on_three_nodes_is_the_run_on_one(cluster: Nodes, tmp_path: Path) -> None:
    """The warm-up, which is deterministic, tells whether it is."""
    one = start(tmp_path / "here", silent_engines(tmp_path), "engines.orphan_s=3")
    assert wait_for(lambda: len(metrics(tmp_path / "here")) == 4, 120), logs(tmp_path / "here")
    one.process.kill()
    assert one.gone(60), one.alive()
    # Nodes of the runs before are free again, or this one would have none.
    command = start(tmp_path / "ray", *ON_RAY)
    assert wait_for(lambda: len(metrics(tmp_path / "ray")) > 4 or command.process.poll() is not None, 180)
    assert nccl_settings(tmp_path / "ray", command.mark) == {"NCCL_CUMEM_ENABLE": "0", "NCCL_P2P_LEVEL": "LOC"}
    out, _ = command.succeed(directory=tmp_path / "ray")
    assert all(f"trainer rank {rank} on 127.0.0." in out for rank in (0, 1)), out
    assert all(f" on {address} (" in out for address in (HEAD, *OTHERS)), out
    here, there = metrics(tmp_path / "here"), metrics(tmp_path / "ray")
    assert [step["step"] for step in there] == list(range(1, 8))
    assert [step["loss"] for step in there[:4]] == pytest.approx([step["loss"] for step in here[:4]], abs=1e-6)
    assert all(0 <= step["reward_mean"] <= 1 for step in there[4:])
    assert (tmp_path / "ray" / "report.html").exists()


def rank(number: int, command: Command) -> int:
    """Process of a trainer's rank, on whichever node it is."""

    def is_it(process: psutil.Process) -> bool:
        try:
            environment, words = process.environ(), process.cmdline()
        except psutil.Error:
            return False
        ours = command.mark in environment.values() and environment.get("RANK") == str(number)
        return ours and "asyncmoe.trainer" in words and "torch.distributed.run" not in words

    return next(process.pid for process in psutil.process_iter() if is_it(process))


def test_a_trainer_and_a_controller_start_again_on_their_nodes_and_ctrl_c_reaches_them(cluster: Nodes, tmp_path: Path) -> None:
    command, directory = start(tmp_path / "run", *ON_RAY, "run.steps=2000"), tmp_path / "run"
    assert wait_for(lambda: len(metrics(directory)) > 6, 240), logs(directory)
    os.kill(rank(1, command), signal.SIGKILL)
    assert wait_for(further(directory, 3), 240), logs(directory)
    engines = marked_pids(command.mark, "sglang::")
    (controller,) = marked_pids(command.mark, "asyncmoe rollout")
    os.kill(controller, signal.SIGKILL)
    assert wait_for(further(directory, 3), 240), logs(directory)
    assert marked_pids(command.mark, "sglang::") == engines, "they were left alone"
    command.process.send_signal(signal.SIGINT)
    status, out, error = command.finish()
    assert status == 130, error[-3000:] + logs(directory)
    again = r"starts again, restart 1 of 2 .*"
    assert re.search(rf"^the trainer {again}: trainer\.1 on 127\.0\.0\..*: a rank was ended by SIGKILL", out, re.MULTILINE), out
    assert re.search(rf"^the controller {again}: controller on 127\.0\.0\..*status -9", out, re.MULTILINE), out
    assert ", which is saved; the same command resumes from" in error, error + logs(directory)
    assert command.gone(), command.alive()


def test_a_node_that_is_lost_is_the_cause(cluster: Nodes, tmp_path: Path) -> None:
    command = start(tmp_path / "run", *ON_RAY, "run.steps=2000", "cluster.heartbeat_timeout_s=20")
    assert wait_for(lambda: len(metrics(tmp_path / "run")) > 4, 240), logs(tmp_path / "run")
    cluster.lose(OTHERS[1])
    status, _, error = command.finish()
    assert status == 1
    assert re.search(rf"^error: trainer rank \d on {OTHERS[1]} ", error, re.MULTILINE), error
    assert command.gone(), command.alive()


def test_a_head_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        line = refused(*demo(tmp_path / "run", "launch=ray"))
    assert line.startswith(f"Ray's head at {address}: got no answer (Connection refused), expected a head that listens; ray start --head")
    assert not (tmp_path / "run").exists()
