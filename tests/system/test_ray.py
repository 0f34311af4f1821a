"""`launch: ray` on a Ray cluster of three nodes, each with an address of this machine's for itself."""

from __future__ import annotations

import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.runs import SMALL, Command, logs, metrics, refused, run, start, wait_for

pytestmark = pytest.mark.system
HEAD, *OTHERS = "127.0.0.2", "127.0.0.3", "127.0.0.4"
ON_RAY = ("launch=ray", "cluster.trainer_nodes=2")
START_S = 120.0


def ray(*arguments: str, log: Path) -> Command:
    """`ray start` in the foreground, with as little beside it as Ray allows and no port that is always the same."""
    free = ("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0", "--object-store-memory=80000000")
    return Command("start", "--block", *free, *arguments, module="ray.scripts.scripts", log=log, RAY_USAGE_STATS_ENABLED="0")


def listens(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A head with two CPUs and two other nodes with one; what runs meanwhile finds it by RAY_ADDRESS."""
    output = tmp_path_factory.mktemp("ray")
    directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a Unix socket's path has 107 characters at most
    with socket.socket() as probe:
        probe.bind((HEAD, 0))
        port = probe.getsockname()[1]
    own = (f"--port={port}", f"--temp-dir={directory}", "--include-dashboard=false", "--disable-usage-stats", "--num-cpus=2")
    nodes = [ray("--head", f"--node-ip-address={HEAD}", *own, log=output / "head.log")]
    try:
        assert wait_for(lambda: listens(HEAD, port), START_S), (output / "head.log").read_text()
        for address in OTHERS:
            join = (f"--address={HEAD}:{port}", f"--node-ip-address={address}", "--num-cpus=1")
            nodes.append(ray(*join, log=output / f"{address}.log"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", f"{HEAD}:{port}")
            yield
    finally:
        for node in reversed(nodes):
            node.process.terminate()
        assert all(node.gone() for node in nodes), [line for node in nodes for line in node.alive()]
        shutil.rmtree(directory)


def test_too_few_nodes_are_counted(cluster: None, tmp_path: Path) -> None:
    arguments = ("run", "examples/demo.yaml", f"run.dir={tmp_path / 'run'}", f"model.path={tmp_path / 'model'}", *SMALL, "launch=ray")
    line = refused(*arguments, "trainer.ranks=4", "cluster.trainer_nodes=4", "engines.start_timeout_s=0.1")
    assert line.startswith("Ray cluster: got 1 node with 2 CPUs, 2 nodes with 1 CPU; free: 4 CPUs, expected 5 nodes: 1 CPU for controller")


def test_a_part_that_fails_is_named_with_its_node(cluster: None, tmp_path: Path) -> None:
    command = start(tmp_path / "run", *ON_RAY, "engines.args=[--nonsense]")
    status, out, error = command.finish()
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert status == 1, out + error
    assert len(lines) == 1, error
    assert lines[0].startswith("error: engine.0 on 127.0.0."), error
    assert "unrecognized arguments: --nonsense" in lines[0]
    assert "Traceback" not in out + error
    assert command.gone(), command.alive()


def test_a_run_on_three_nodes_is_the_run_on_one(cluster: None, tmp_path: Path) -> None:
    run(tmp_path / "here", "run.steps=1")
    # Nodes of the run before are free again, or this one would have none.
    command = start(tmp_path / "ray", *ON_RAY)
    status, out, error = command.finish()
    assert status == 0, out + error + logs(tmp_path / "ray")
    assert command.gone(), command.alive()
    assert all(f"trainer rank {rank} on 127.0.0." in out for rank in (0, 1)), out
    assert all(f" on {address} (" in out for address in (HEAD, *OTHERS)), out
    here, there = metrics(tmp_path / "here"), metrics(tmp_path / "ray")
    assert [step["step"] for step in there] == list(range(1, 8))
    assert [step["loss"] for step in there[:4]] == pytest.approx([step["loss"] for step in here[:4]], abs=1e-6)
    assert all(0 <= step["reward_mean"] <= 1 for step in there[4:])
    assert (tmp_path / "ray" / "report.html").exists()


def test_ctrl_c_reaches_the_trainer_on_other_nodes(cluster: None, tmp_path: Path) -> None:
    command = start(tmp_path / "run", *ON_RAY, "run.steps=2000")
    assert wait_for(lambda: len(metrics(tmp_path / "run")) > 5 or command.process.poll() is not None, 180)
    command.process.send_signal(signal.SIGINT)
    status, out, error = command.finish()
    assert status == 1, out + error
    assert "error: stopped at a checkpoint; the same command goes on from" in error, error + logs(tmp_path / "run")
    assert command.gone(), command.alive()
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1


def test_a_head_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        line = refused("run", "examples/demo.yaml", f"run.dir={tmp_path / 'run'}", f"model.path={tmp_path / 'model'}", "launch=ray")
    assert line.startswith(f"Ray's head at {address}: got no answer (Connection refused), expected one that listens; ray start --head")
    assert not (tmp_path / "run").exists()
