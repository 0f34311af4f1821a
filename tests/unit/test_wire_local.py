"""The Unix socket of the wire: who takes it, who is let in, and what is left of it."""

from __future__ import annotations

import asyncio
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import pytest
import zmq

from asyncmoe.errors import UserError, WaitTimeout
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


def test_without_a_secret_nothing_is_answered() -> None:
    def ask(to: Rendezvous) -> int:
        with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
            plain.setsockopt(zmq.LINGER, 0)
            plain.connect(local.address(Path(to.local_dir)))
            plain.send_multipart([b"12345678", msgspec.msgpack.encode(Commit(0))])
            return plain.poll(1_000)

    assert served(ask) == 0


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


def test_a_link_to_a_private_directory_is_not_used(temporary: Path) -> None:
    def ask(to: Rendezvous) -> bool:
        (temporary / "link").symlink_to(to.local_dir)
        return local.reachable(str(temporary / "link"))

    assert served(ask) is False


def test_nothing_is_left_when_the_server_ends(temporary: Path) -> None:
    served(_fetch)
    assert list(temporary.iterdir()) == []


def test_what_a_killed_server_left_goes_when_the_next_one_starts(temporary: Path) -> None:
    program = (
        "import asyncio, sys, tempfile\n"
        "from asyncmoe.rpc.server import Server\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "async def main():\n"
        "    server = Server(None)\n"
        "    print((await server.start()).local_dir, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(temporary)], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        left = Path(server.stdout.readline().decode().strip())
        other = local.make()
        assert left.exists(), "a server that runs lost its socket to another's start"
        server.send_signal(signal.SIGKILL)
        server.wait(10)
    assert (left / local.SOCKET).exists()
    again = local.make()
    assert not left.exists()
    assert other.exists(), "a directory whose socket is not bound yet was taken away"
    assert again.exists()


def test_the_longest_folder_for_temporary_files_and_one_too_long(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 107 - len("/asyncmoe-wire-xxxxxxxx/socket") - len(str(temporary)) - 1
    for length in (room, room + 1):
        folder = temporary / ("f" * length)
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        if length == room:
            assert served(_fetch) == FRAMES
        else:
            with pytest.raises(UserError, match="TMPDIR"):
                served(_fetch)
        assert list(folder.iterdir()) == []


def test_another_users_leftovers_are_left_alone(temporary: Path) -> None:
    theirs = temporary / f"{local.PREFIX}theirs"
    theirs.mkdir(mode=0o755)
    theirs.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(theirs / local.SOCKET))
    local.make()
    assert theirs.exists()
