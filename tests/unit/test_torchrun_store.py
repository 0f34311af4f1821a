"""torchrun's store listens where the ranks meet, and nowhere else."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from asyncmoe.errors import UserError
from asyncmoe.launch.torchrun import free_port, torchrun
from asyncmoe.process import Child
from asyncmoe.rpc.address import interfaces

RANK = """
import sys, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
value = __import__("torch").ones(1)
dist.all_reduce(value)
folder, rank = Path(sys.argv[1]), dist.get_rank()
(folder / f"met{rank}").write_text(str(value.item()))
import time
while not (folder / "leave").exists():
    time.sleep(0.02)
"""


def started(tmp_path: Path, master: str, port: int) -> Child:
    (tmp_path / "store_rank.py").write_text(RANK)
    command = [sys.executable, *torchrun(2, (master, port), "store_rank", str(tmp_path))]
    (tmp_path / "t").mkdir()
    variables = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "TMPDIR": str(tmp_path / "t")}
    return Child("trainer", command, tmp_path / "log", variables)


def test_ranks_meet_on_loopback_and_no_other_address_answers(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    child = started(tmp_path, "127.0.0.1", port)
    try:
        while not all((tmp_path / f"met{rank}").exists() for rank in (0, 1)):
            assert not child.wait(0.05), child.log.read_text()
        assert (tmp_path / "met0").read_text() == "2.0"
        others = ["127.0.0.2", *(a for found in interfaces().values() for a in found if not a.startswith("127."))]
        for address in others:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), 5.0)
        socket.create_connection(("127.0.0.1", port), 5.0).close()
        (tmp_path / "leave").write_text("")
        assert child.wait(30)
        assert child.returncode == 0, child.log.read_text()
        assert list((tmp_path / "t").iterdir()) == [], "torchrun leaves no temporary files"
    finally:
        child.end(1.0)


def test_an_address_of_another_machine_is_refused_in_a_line(tmp_path: Path) -> None:
    child = started(tmp_path, "192.0.2.1", 29555)
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
