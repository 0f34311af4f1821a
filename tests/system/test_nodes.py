"""A run started by hand on several "machines" of this one: two torchrun agents, a controller, and engines that join, die and leave."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncmoe.launch.torchrun import free_port, trainer_environment
from tests.system.runs import SMALL, Command, further, generated, logs, marked_pids, metrics, provide, wait_for

pytestmark = pytest.mark.system
ROOM = 'engines.args=["--mem-fraction-static","0.9"]'
"""SGLang takes for its weights what other programs take of the machine's memory while it loads them."""
OVERRIDES = ("run.steps=2000", "engines.join=true", "trainer.timeout_s=120", "cluster.heartbeat_timeout_s=4")


class Nodes:
    """Processes of one run, each with the same configuration under a directory of its own name for it."""

    def __init__(self, tmp: Path) -> None:
        self.run, self._tmp = tmp / "shared" / "run", tmp
        self._started: dict[str, Command] = {}
        (tmp / "shared").mkdir()
        provide(tmp / "shared" / "model")

    def start(self, node: str, *command: str, module: str = "asyncmoe", options: tuple[str, ...] = ()) -> Command:
        """A command on `node`, which has the shared directory at a path of its own."""
        shared, log = self._tmp / node, self._tmp / f"{node}.log"
        shared.symlink_to(self._tmp / "shared", target_is_directory=True)
        places = (f"run.dir={shared / 'run'}", f"model.path={shared / 'model'}")
        arguments = (*command, "examples/demo.yaml", *places, *SMALL, *OVERRIDES, *options)
        self._started[node] = Command(*arguments, module=module, log=log, **trainer_environment({}))
        return self._started[node]

    def said(self, node: str) -> str:
        """Return the output of a node's process."""
        return (self._tmp / f"{node}.log").read_text()

    def agent(self, rank: int, port: int) -> Command:
        """A torchrun agent with one rank."""
        torchrun = ("--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}")
        return self.start(f"trainer{rank}", *torchrun, "-m", "asyncmoe.trainer", module="torch.distributed.run")

    def wait(self, what: str, seconds: float, done: Callable[[], bool]) -> None:
        """Until something has come; no process may fail meanwhile but by a signal of ours."""

        def failed() -> list[str]:
            return [node for node, command in self._started.items() if (command.process.poll() or 0) > 0]

        came = wait_for(lambda: bool(done() or failed()), seconds)
        said = "\n".join(f"== {node}\n{self.said(node)[-3000:]}" for node in self._started)
        assert came, f"{what} did not come\n{said}\n{logs(self.run)}"
        assert not failed(), said + logs(self.run)

    def end(self) -> None:
        for command in self._started.values():
            command.process.kill()
            command.process.wait(10)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.end()


def test_two_agents_train_with_engines_that_join_die_and_leave(nodes: Nodes) -> None:
    port = free_port("127.0.0.1")
    # Started in an order that no launcher would choose: every process waits for the missing ones.
    agents = [nodes.agent(1, port), nodes.agent(0, port)]
    first = nodes.start("a", "engine", options=("--name", "engine.a"))
    controller = nodes.start("controller", "rollout")
    nodes.wait("the first step", 180, lambda: len(metrics(nodes.run)) > 4)
    second = nodes.start("b", "engine", options=("--name", "engine.b"))
    nodes.wait("the second engine", 120, lambda: "engine.b has joined" in nodes.said("controller"))
    # It waits for its first version, and the one that generates dies: with it its server ends; nobody says so.
    first.process.send_signal(signal.SIGKILL)
    nodes.wait("the end of the first engine", 60, lambda: "engine.a is fenced" in nodes.said("controller"))
    nodes.wait("steps with the second engine alone", 60, further(nodes.run, 6))
    controller.process.send_signal(signal.SIGINT)
    for command in (controller, *agents, second):
        assert command.process.wait(60) == 0, logs(nodes.run)
    for command in (controller, *agents, second, first):
        assert command.gone(), command.alive()
    steps = len(metrics(nodes.run))
    assert [record["step"] for record in metrics(nodes.run)] == list(range(1, steps + 1))
    assert generated(nodes.run) == {"engine.a", "engine.b"}


@pytest.mark.thorough
def test_an_engine_over_two_nodes_is_lost_with_one_of_them_and_comes_again(nodes: Nodes) -> None:
    """Beside one of one node, with every version of both checked against the trainer's weights."""
    patient = ("engines.start_timeout_s=600", "cluster.heartbeat_timeout_s=20", "trainer.timeout_s=600", "engines.hang_timeout_s=300", ROOM)
    options = ("engines.count=2", "engines.tp=2", "engines.nodes=2", "sync.verify_every=1", *patient)
    named = ("--name", "engine.a")
    other = nodes.start("a1", "engine", options=(*options, *named, "--node", "1"))
    head = nodes.start("a0", "engine", options=(*options, *named))
    plain = nodes.start("b", "engine", options=(*options, "engines.nodes=1", "--name", "engine.b"))
    controller = nodes.start("controller", "rollout", options=options)
    place = ("--nnodes=1", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port('127.0.0.1')}")
    trainer = nodes.start("trainer", *place, "-m", "asyncmoe.trainer", module="torch.distributed.run", options=options)
    nodes.wait("a step with both engines", 600, lambda: len(metrics(nodes.run)) > 4 and generated(nodes.run) == {"engine.a", "engine.b"})

    (server,) = marked_pids(other.mark, "-m asyncmoe.platform.sglang")[:1]
    os.kill(server, signal.SIGKILL)
    nodes.wait("the loss of the engine", 60, lambda: "engine.a is fenced" in nodes.said("controller"))
    nodes.wait("steps without it", 120, further(nodes.run, 4))
    nodes.wait("its return", 600, lambda: nodes.said("controller").count("engine.a has joined") == 2)
    nodes.wait("steps with it", 300, further(nodes.run, 4))

    other.process.send_signal(signal.SIGKILL)  # with its server, and nothing starts it again
    nodes.wait("the loss of the engine", 60, lambda: nodes.said("controller").count("engine.a is fenced") == 2)
    nodes.wait("steps without it", 120, further(nodes.run, 4))
    # Must join before the run's end: a later one waits for another controller.
    nodes.wait("node 0, to begin anew", 120, lambda: nodes.said("controller").count("node 0 of engine.a has come") == 3)
    controller.process.send_signal(signal.SIGINT)
    for command in (controller, trainer, plain, head):
        assert command.process.wait(120) == 0, nodes.said("a0") + logs(nodes.run)
        assert command.gone(), command.alive()
    assert other.gone(), other.alive()
    assert [record["step"] for record in metrics(nodes.run)] == list(range(1, len(metrics(nodes.run)) + 1))
    assert re.search(r"engine\.a is fenced: .*node 1 on .*: ended with status -9", nodes.said("controller")), nodes.said("controller")
