"""torchrun's store: a file on one machine, where nothing listens; over several, the address at which the ranks meet, and no other."""

from __future__ import annotations

import socket
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from asyncmoe.errors import UserError
from asyncmoe.launch.torchrun import free_port, torchrun
from asyncmoe.process import Child
from asyncmoe.rpc.address import interfaces

RANK = """
import sys, torch.distributed as dist
from pathlib import Path
from datetime import timedelta
from asyncmoe.platform import collectives
collectives.join("gloo", timedelta(seconds=30))
value = __import__("torch").ones(1)
dist.all_reduce(value)
folder, rank = Path(sys.argv[1]), dist.get_rank()
(folder / f"met{rank}").write_text(str(value.item()))
import time
while not (folder / "leave").exists():
    time.sleep(0.02)
"""


def started(tmp_path: Path, master: str, port: int, nodes: int = 1) -> Child:
    (tmp_path / "store_rank.py").write_text(RANK)
    command = [sys.executable, *torchrun(2 // nodes, (master, port), "store_rank", str(tmp_path), nodes=nodes)]
    (tmp_path / "t").mkdir()
    variables = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "TMPDIR": str(tmp_path / "t")}
    return Child("trainer", command, tmp_path / "log", variables)


def wait_for(child: Child, condition: Callable[[], bool]) -> None:
    while not condition():
        assert not child.wait(0.05), child.log.read_text()


def test_ranks_of_one_machine_meet_in_a_file_and_no_port_answers(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    child = started(tmp_path, "127.0.0.1", port)
    try:
        wait_for(child, lambda: all((tmp_path / f"met{rank}").exists() for rank in (0, 1)))
        assert (tmp_path / "met0").read_text() == "2.0"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5.0)
        (folder,) = (tmp_path / "t").glob("asyncmoe-*")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert (folder / "ranks").exists()
        (tmp_path / "leave").write_text("")
        assert child.wait(30)
        assert child.returncode == 0, child.log.read_text()
        assert not list((tmp_path / "t").glob("asyncmoe-*")), "torchrun leaves no temporary files"
    finally:
        child.end(1.0)


def test_the_first_of_several_machines_listens_on_one_address(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    child = started(tmp_path, "127.0.0.1", port, nodes=2)

    def answers() -> bool:
        with suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5.0).close()
            return True
        return False

    try:
        wait_for(child, answers)
        others = ["127.0.0.2", *(a for found in interfaces().values() for a in found if not a.startswith("127."))]
        for address in others:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), 5.0)
    finally:
        child.end(1.0)


def test_an_address_of_another_machine_is_refused_in_a_line(tmp_path: Path) -> None:
    child = started(tmp_path, "192.0.2.1", 29555, nodes=2)
    assert child.wait(60)
    assert child.returncode == UserError.exit_code
    expected = "address at which trainer ranks meet: got 192.0.2.1:29555 (Cannot assign requested address), expected one of this machine"
    assert (child.reason or "").startswith(expected)


def test_a_name_that_is_loopback_only_here_is_every_address_for_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncmoe.launch.agent_store import listen_on

    monkeypatch.setattr(socket, "gethostbyname", {"node3": "127.0.1.1", "node4": "10.0.0.4", "127.0.0.1": "127.0.0.1"}.__getitem__)
    assert listen_on("node3", 2) == "0.0.0.0"
    assert listen_on("node3", 1) == "127.0.1.1"
    assert listen_on("node4", 2) == "10.0.0.4"
    assert listen_on("127.0.0.1", 2) == "127.0.0.1"
