"""The Unix socket of the wire: who takes it, who is let in, and what is left of it."""

from __future__ import annotations

import asyncio
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import pytest

from asyncmoe.errors import WaitTimeout
from asyncmoe.rpc import local
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.messages import Commit, Done, Fetched, Reply, Request
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.rpc.server import Server
from asyncmoe.rpc.worker_messages import WorkerFetch
from asyncmoe.trajectory import Buffer

T = TypeVar("T")
FRAMES: list[Buffer] = [b"", b"x", bytes(range(256)) * 4096]


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path of its own: one of a Unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="a") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


async def _answer(request: Request) -> Reply | tuple[Reply, list[Buffer]]:
    return (Fetched(), FRAMES) if isinstance(request, WorkerFetch) else Done()


def served(ask: Callable[[Rendezvous], T], here_only: bool = False) -> T:
    """What `ask` finds in a thread of its own while a server runs."""

    async def main() -> T:
        async with Server(_answer, here_only=here_only) as server:
            to = await server.start()
            serving = asyncio.ensure_future(server.serve())
            try:
                return await asyncio.to_thread(ask, to)
            finally:
                serving.cancel()

    return asyncio.run(main())


def _fetch(to: Rendezvous) -> list[bytes]:
    with Client(to, "t") as client:
        return [bytes(frame) for frame in client.ask(WorkerFetch(("a",), ()), 20)[1]]


def test_a_client_on_the_same_host_takes_it_and_gets_the_same_frames() -> None:
    def ask(to: Rendezvous) -> list[bytes]:
        directory = Path(to.local_dir)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        nowhere = msgspec.structs.replace(to, address="tcp://127.0.0.1:1")
        assert _fetch(msgspec.structs.replace(to, local_dir="")) == FRAMES
        return _fetch(nowhere)

    assert served(ask) == FRAMES


@pytest.mark.parametrize("after_s", [0.0, 0.5], ids=["asked-at-once", "asked-when-refused"])
def test_a_wrong_secret_is_refused(after_s: float) -> None:
    def ask(to: Rendezvous) -> None:
        with Client(msgspec.structs.replace(to, local_secret="wrong"), "t") as client:
            time.sleep(after_s)
            with pytest.raises(WaitTimeout, match="rejected our key"):
                client.ask(Commit(0), 20)

    served(ask)


def test_a_server_for_its_own_host_alone_listens_on_no_port() -> None:
    def listening() -> set[int]:
        return {c.laddr.port for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}

    before = listening()

    def ask(to: Rendezvous) -> list[bytes]:
        assert listening() <= before
        assert to.address == local.address(Path(to.local_dir))
        return _fetch(to)

    assert served(ask, here_only=True) == FRAMES


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_may_enter_is_not_used(mode: int) -> None:
    def ask(to: Rendezvous) -> list[bytes]:
        Path(to.local_dir).chmod(mode)
        assert not local.reachable(to.local_dir)
        return _fetch(to)

    assert served(ask) == FRAMES
