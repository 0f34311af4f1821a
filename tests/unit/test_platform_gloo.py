"""Gloo's ports after a process group has met: nobody connects, and whoever of another user had connected is cut off."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncmoe.platform import gloo

NOBODY = 65534
CONTEXT: Any = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "torch.distributed", "asyncmoe.platform.gloo"])


def rank(number: int, store: str, ports: Queue[list[tuple[str, int]]], leave: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    gloo.install()
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=number, world_size=2)
    dist.new_group([0, 1], backend="gloo")
    open_ports = []
    for fd in gloo._listeners():
        with socket.socket(fileno=os.dup(fd)) as one:
            open_ports.append(one.getsockname()[:2])
    ports.put(open_ports)
    assert leave.wait(30)
    value = torch.ones(1000)
    dist.all_reduce(value)
    assert value[0] == 2
    dist.destroy_process_group()


def test_a_group_answers_nobody_once_its_ranks_have_met(tmp_path: Path) -> None:
    ports, leave = CONTEXT.Queue(), CONTEXT.Event()
    ranks = [CONTEXT.Process(target=rank, args=(number, str(tmp_path / "store"), ports, leave)) for number in (0, 1)]
    for one in ranks:
        one.start()
    found = [place for _ in ranks for place in ports.get(timeout=60)]
    assert len(found) >= 4
    tries = [socket.socket() for _ in found]
    for one, place in zip(tries, found, strict=True):
        assert place[0] == "127.0.0.1"
        one.setblocking(False)
        one.connect_ex(place)
    time.sleep(1.0)
    for one in tries:
        with pytest.raises(OSError, match="not connected"):
            one.getpeername()
        one.close()
    leave.set()
    for one in ranks:
        one.join(30)
        assert one.exitcode == 0


def connect_as(user: int, port: int, told: Any) -> None:
    os.setresuid(user, user, user)
    with socket.socket() as connection:  # create_connection would import a codec, which the user may not read
        connection.connect(("127.0.0.1", port))
        told.send(connection.getsockname()[1])
        told.send(connection.recv(1))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("user", "cut"), [(NOBODY, True), (0, False)])
def test_connections_of_another_user_are_cut(user: int, cut: bool, caplog: pytest.LogCaptureFixture) -> None:
    here, there = CONTEXT.Pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        other = CONTEXT.Process(target=connect_as, args=(user, listener.getsockname()[1], there))
        other.start()
        accepted, peer = listener.accept()
        assert here.poll(30)
        assert here.recv() == peer[1]
        gloo.shut({listener.fileno(): os.fstat(listener.fileno()).st_ino})
        assert (f"a process of user {NOBODY} had connected" in caplog.text) == cut
        if not cut:
            accepted.sendall(b"x")
        assert here.poll(30)
        assert here.recv() == (b"" if cut else b"x")
        other.join(10)
        accepted.close()
