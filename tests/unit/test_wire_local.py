"""The Unix socket of the wire: its owner, admission, and cleanup."""

from __future__ import annotations

import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import psutil
import pytest

from asyncmoe.errors import WaitTimeout
from asyncmoe.log.log import Place
from asyncmoe.rpc import local
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.messages import Commit, Done, Fetched, Reply, Request
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.rpc.worker_messages import WorkerFetch
from asyncmoe.trajectory import Buffer
from tests.unit.test_wire import Running

FRAMES: list[Buffer] = [b"", b"x", memoryview(bytearray(range(256)) * 4096)]


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path of its own: one of a Unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="a") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


async def _answer(request: Request) -> Reply | tuple[Reply, list[Buffer]]:
    return (Fetched(), FRAMES) if request == WorkerFetch({"a": Place(1, 0)}, (1, 2), False) else Done()


def _fetch(to: Rendezvous) -> list[bytes]:
    with closing(Client(to, "t")) as client:
        reply, frames = client.ask(WorkerFetch({"a": Place(1, 0)}, (1, 2), False), 20)
    assert reply == Fetched()
    assert all(memoryview(frame).readonly for frame in frames)
    return [bytes(frame) for frame in frames]


def test_a_client_on_the_same_host_takes_it_and_gets_the_same_frames() -> None:
    with Running(_answer) as running:
        to = running.rendezvous
        assert stat.S_IMODE(Path(to.local_dir).stat().st_mode) == 0o700
        assert _fetch(msgspec.structs.replace(to, local_dir="")) == FRAMES
        assert _fetch(msgspec.structs.replace(to, address="tcp://127.0.0.1:1")) == FRAMES


@pytest.mark.parametrize("after_s", [0.0, 0.5], ids=["asked-at-once", "asked-when-refused"])
def test_a_wrong_secret_is_refused(after_s: float) -> None:
    with Running(_answer) as running, closing(Client(msgspec.structs.replace(running.rendezvous, local_secret="wrong"), "t")) as client:
        time.sleep(after_s)
        with pytest.raises(WaitTimeout, match="rejected our key"):
            client.ask(Commit(0), 20)


def test_a_server_for_its_own_host_alone_listens_on_no_port() -> None:
    def listening() -> set[int]:
        return {c.laddr.port for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}

    before = listening()
    with Running(_answer, here_only=True) as running:
        assert listening() <= before
        assert running.rendezvous.address == local.address(Path(running.rendezvous.local_dir))
        assert _fetch(running.rendezvous) == FRAMES


@pytest.mark.parametrize("mode", [0o770, 0o701])
def test_a_directory_that_others_may_enter_is_not_used(mode: int) -> None:
    with Running(_answer) as running:
        Path(running.rendezvous.local_dir).chmod(mode)
        assert not local.reachable(running.rendezvous.local_dir)
        assert _fetch(running.rendezvous) == FRAMES
