"""The process groups of weights by broadcast: one for each set of engines, and nothing left of those before."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from asyncmoe.rpc.messages import Done, EngineInfo, Engines, EnginesAsk, Reply, Request
from asyncmoe.weights.sender.broadcast import BroadcastPublisher
from tests.configs import minimal

ENGINE = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
limit, groups = timedelta(seconds=30), []
for line in sys.stdin:
    host, port, name = line.split()
    store = c10d.PrefixStore(name, dist.TCPStore(host, int(port), 2, False, limit))
    group, _ = c10d._new_process_group_helper(2, 1, [], c10d.Backend("gloo"), store, group_name=name, timeout=limit)
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    groups.append(group)  # an engine leaves none
    print("joined", flush=True)
    found = torch.zeros(3)
    dist.broadcast(found, src=0, group=group)
    print(*found.tolist(), flush=True)
"""


class Controller:
    """A client whose controller has one engine, which counts as another one at every look."""

    def __init__(self) -> None:
        self.roster, self.ports = 0, list[int]()
        self.start()

    def start(self) -> None:
        self.engine = subprocess.Popen([sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def kill(self) -> None:
        self.engine.kill()
        self.engine.communicate()

    def said(self) -> str:
        return self.engine.stdout.readline().strip()

    def ask(self, request: Request, timeout_s: float) -> tuple[Reply, list[Any]]:
        if isinstance(request, EnginesAsk):
            self.roster += 1
            return Engines((EngineInfo("engine.0", 1, 1, 1, 0),), 2, self.roster), []
        self.ports.append(request.port)
        self.engine.stdin.write(f"{request.host} {request.port} {request.group}\n")
        self.engine.stdin.flush()
        assert self.said() == "joined"
        return Done(), []


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    made = Controller()
    yield made
    made.kill()


@pytest.fixture
def publisher(controller: Controller) -> Iterator[BroadcastPublisher]:
    config = minimal(cluster={"network": "127.0.0.0/8"}, sync={"method": "broadcast", "timeout_s": 30.0})
    nothing: Any = None
    client: Any = controller
    mesh: Any = SimpleNamespace(rank=0, device=torch.device("cpu"), backend="gloo")
    made = BroadcastPublisher(config, nothing, client, mesh, nothing)
    yield made
    made.close()


def held() -> tuple[int, int, int]:
    """Open files and sockets, threads, and groups that torch knows, of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(distributed_c10d._world.pg_map)


def exchanged(controller: Controller, publisher: BroadcastPublisher) -> bool:
    """Whether the engine gets what is sent over the group of its roster."""
    group = publisher._join()
    dist.broadcast(torch.full((3,), float(controller.roster)), src=0, group=group)
    return controller.said() == " ".join([str(float(controller.roster))] * 3)


def test_a_change_of_engines_leaves_nothing_of_the_former_group(controller: Controller, publisher: BroadcastPublisher) -> None:
    counts = []
    for _ in range(6):
        assert exchanged(controller, publisher)
        counts.append(held())
    assert counts[1] == counts[-1]
    for port in controller.ports[:-1]:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5.0)
    controller.kill()  # which holds up nobody
    controller.start()
    assert exchanged(controller, publisher)
