"""The nodes that a run requests from Ray, the commands of every launcher on each, and the error without a cluster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from asyncmoe.config import Config
from asyncmoe.launch.commands import EngineMachine, Launch, Launcher, engine_machines, table
from asyncmoe.launch.ray.planning import bundles, environment, joining, strategy
from asyncmoe.rpc.environment import STARTS, TRAINER_EPOCH
from tests.configs import minimal


def config(**sections: dict[str, Any]) -> Config:
    return minimal("/shared/run", "/m", **sections)


SPREAD = config(
    engines={"count": 3, "tp": 2}, trainer={"ranks": 8, "tp": 1, "ep": 2}, cluster={"engine_nodes": 2, "trainer_nodes": 2, "network": "ib0"}
)


def test_ranks_and_engines_are_spread_over_their_nodes() -> None:
    found = bundles(SPREAD, gpus=True)
    assert [b.title for b in found] == ["controller and engine 0-1", "engine 2", "trainer rank 0-3", "trainer rank 4-7"]
    assert [b.machine for b in found] == [EngineMachine((0, 1)), EngineMachine((2,)), None, None]
    assert [b.resources for b in found] == [{"CPU": n, "GPU": n} for n in (4, 2, 4, 4)]
    assert [b.resources for b in bundles(SPREAD, gpus=False)] == [{"CPU": n} for n in (4, 2, 4, 4)]
    assert strategy(found) == "STRICT_SPREAD"
    assert strategy(bundles(config(trainer={"ranks": 2}), gpus=True)) == "PACK"


FILE = Path("/shared/run/config.yaml")


def test_every_node_starts_the_processes_of_its_part() -> None:
    engines = [(f"e{node}", machine) for node, machine in enumerate(engine_machines(SPREAD))]

    def launched(place: str, launch: Launch) -> Any:
        return SimpleNamespace(returncode=0, place=place, launch=launch)

    by: Any = Launcher(engines, ["t0", "t1"], launched, lambda name: None, lambda epoch: ("10.0.0.3", 4000 + epoch))
    found: list[Any] = [one for part in table(SPREAD, FILE, by).values() for one in part.start(2)]
    assert [(one.place, one.launch.name) for one in found] == [
        *(("e0", "controller"), ("e0", "engine.0"), ("e0", "engine.1"), ("e1", "engine.2"), ("t0", "trainer.0"), ("t1", "trainer.1"))
    ]
    assert [one.launch.arguments[2:] for one in found[:4]] == [
        ("rollout", str(FILE)),
        ("engine", str(FILE), "--name", "engine.0", "--index", "0"),
        ("engine", str(FILE), "--name", "engine.1", "--index", "1"),
        # Of this node it is the first again, and takes the first of the GPUs that Ray shows it.
        ("engine", str(FILE), "--name", "engine.2", "--index", "0"),
    ]
    words = " ".join(found[-1].launch.arguments)
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr 10.0.0.3 --master-port 4002 --max-restarts 0" in words
    assert words.endswith(f"-m asyncmoe.trainer {FILE}")
    # What the server of an engine writes has a file of its own, engine-0.log.
    logs = ["controller", "engine-0-joins", "engine-1-joins", "engine-2-joins", "trainer-0", "trainer-1"]
    assert [one.launch.log for one in found] == [Path(f"/shared/run/logs/{name}.log") for name in logs]
    variables = [TRAINER_EPOCH, STARTS, STARTS, STARTS, TRAINER_EPOCH, TRAINER_EPOCH]
    assert [one.launch.environment[name] for one, name in zip(found, variables, strict=True)] == ["2"] * 6


def test_processes_of_several_machines_do_not_meet_on_loopback() -> None:
    one, two = ["10.0.0.3", "10.0.0.3"], ["10.0.0.3", "10.0.0.4"]
    plain = config()
    assert [joining(plain, addresses).cluster.network for addresses in ([], one, two)] == ["loopback", "loopback", "hostname"]
    assert joining(plain).engines.join
    assert joining(SPREAD, two).cluster.network == "ib0"
    ours = {"PATH": "/bin", "NCCL_SOCKET_IFNAME": "ib0", "ASYNCMOE_HOST": "10.0.0.9"}
    assert environment(plain, "10.0.0.4", one, ours) == {"NCCL_SOCKET_IFNAME": "ib0"}
    assert environment(plain, "10.0.0.4", two, ours) == {"NCCL_SOCKET_IFNAME": "ib0", "ASYNCMOE_HOST": "10.0.0.4"}
    assert environment(SPREAD, "10.0.0.4", two, ours) == {"NCCL_SOCKET_IFNAME": "ib0"}
