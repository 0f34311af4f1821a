"""The wire with real sockets: one server in a thread with its own loop, clients in the test."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import stat
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from asyncmoe import errors
from asyncmoe.errors import ConfigError, EngineError, InvariantBroken, ProtocolError, TrajectoryRejected, UserError, WaitTimeout
from asyncmoe.log.log import Place
from asyncmoe.rpc import codec, keys
from asyncmoe.rpc import server as rpc_server
from asyncmoe.rpc.client import Client, rebuild
from asyncmoe.rpc.messages import Commit, Done, EnginesAsk, Fetched, Goodbye, Hello, Lease, Leased, Refused, Reply, Request
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.rpc.server import Server
from asyncmoe.rpc.worker_messages import WorkerFetch
from asyncmoe.trajectory import Buffer

Answer = Reply | tuple[Reply, list[Buffer]]


class Running:
    """A server on its own thread; `ended` holds what `serve` raised."""

    def __init__(self, handler: Callable[[Request], Awaitable[Answer]], **options: Any) -> None:
        self.ended: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(handler, options)), daemon=True)
        self._thread.start()
        assert self._started.wait(10)

    async def _main(self, handler: Callable[[Request], Awaitable[Answer]], options: dict[str, Any]) -> None:
        async with Server(handler, **options) as server:
            self.rendezvous = await server.start()
            self._loop, self._serving = asyncio.get_running_loop(), asyncio.ensure_future(server.serve())
            self._started.set()
            try:
                await self._serving
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
                self.ended = error

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(10)
        assert not self._thread.is_alive()


async def _done(request: Request) -> Answer:
    return Done()


def stranger(address: str) -> Rendezvous:
    """A controller with keys of its own that is not there."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return Rendezvous(address, public, public, secret, "here", os.getpid(), time.time())


HELLO = Hello(0, 1, "digest", 0)
LEASE = Lease(0, "rl", 1, 0, 60.0)


def test_a_slow_lease_holds_up_nobody() -> None:
    release = threading.Event()

    async def handler(request: Request) -> Answer:
        if isinstance(request, Lease):
            while not release.is_set():
                await asyncio.sleep(0.01)
            return Leased(0, (), 0, {})
        return Fetched(), []

    with (
        Running(handler) as to,
        ThreadPoolExecutor(1) as pool,
        closing(Client(to.rendezvous, "slow")) as slow,
        closing(Client(to.rendezvous, "fast")) as fast,
    ):
        leasing = pool.submit(slow.ask, LEASE, 20)
        for _ in range(20):
            fast.ask(WorkerFetch({}), 20)
        assert not leasing.done()
        release.set()
        assert leasing.result(20)[0] == Leased(0, (), 0, {})


def test_a_late_reply_is_not_taken_for_the_next() -> None:
    async def handler(request: Request) -> Answer:
        await asyncio.sleep(0.4 if request.step == 1 else 0)
        return Leased(request.step, (), 0, {})

    with Running(handler) as running, closing(Client(running.rendezvous, "t")) as client:
        client.ask(Commit(0), 20)
        with pytest.raises(WaitTimeout, match=r"t sent Commit: no reply"):
            client.ask(Commit(1), 0.1)
        time.sleep(0.5)
        assert client.ask(Commit(2), 20)[0] == Leased(2, (), 0, {})


class Odd(EngineError):
    """One of ours that is defined elsewhere: it crosses as its parent."""


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (Odd("odd"), EngineError),
        (ConfigError("trainer.tp", got=3, expected="a divisor", hint="change it"), ConfigError),
        (TrajectoryRejected("bad_reward", "g1: nan"), TrajectoryRejected),
        (WaitTimeout("engine 0", "health", 3.0), WaitTimeout),
    ],
)
def test_a_refusal_is_the_error_that_was_raised_and_the_server_goes_on(raised: Exception, kind: type[Exception]) -> None:
    async def handler(request: Request) -> Answer:
        if isinstance(request, Hello):
            raise raised
        return Done()

    with Running(handler) as running, closing(Client(running.rendezvous, "t")) as client:
        with pytest.raises(kind) as caught:
            client.ask(HELLO, 20)
        assert type(caught.value) is kind
        assert str(caught.value) == str(raised)
        if kind is TrajectoryRejected:
            assert caught.value.reason == "bad_reward"  # type: ignore[attr-defined]
        assert client.ask(Commit(0), 20)[0] == Done()


def test_every_error_class_can_be_rebuilt_and_nothing_else() -> None:
    for kind in [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.AsyncmoeError)]:
        error = rebuild(Refused(kind.__name__, "what: got 1, expected 2"))
        assert (type(error), str(error)) == (kind, "what: got 1, expected 2")
        assert not isinstance(error, UserError) or error.hint is None
    for name in ("KeyError", "annotations", "__builtins__"):
        error = rebuild(Refused(name, "text"))
        assert type(error) is ProtocolError
        assert f"{name}: text" in str(error)


@pytest.mark.parametrize("raised", [KeyError("broken"), InvariantBroken("counts")])
def test_a_bug_of_the_handler_reaches_the_client_and_ends_serve(raised: Exception) -> None:
    async def handler(request: Request) -> Answer:
        if isinstance(request, Commit):
            raise raised
        await asyncio.sleep(60)
        return Done()

    with (
        Running(handler) as to,
        ThreadPoolExecutor(1) as pool,
        closing(Client(to.rendezvous, "t")) as client,
        closing(Client(to.rendezvous, "u")) as other,
    ):
        waiting = pool.submit(other.ask, LEASE, 30)
        time.sleep(0.2)
        with pytest.raises(InvariantBroken):
            client.ask(Commit(0), 20)
        with pytest.raises(WaitTimeout, match="connection was lost"):
            waiting.result(20)
    assert to.ended is raised


def _raw(rendezvous: Rendezvous, context: zmq.Context) -> zmq.Socket:
    raw: zmq.Socket = context.socket(zmq.DEALER)
    raw.linger, raw.rcvtimeo = 0, 5_000
    raw.curve_serverkey = rendezvous.server_public.encode()
    raw.curve_publickey, raw.curve_secretkey = rendezvous.client_public.encode(), rendezvous.client_secret.encode()
    raw.connect(rendezvous.address)
    return raw


@pytest.mark.parametrize(
    "frames",
    [
        [b"only"],
        [b"1", b""],
        [b"1", b"\x91" * 50_000],
        [b"1", b"\xdd\xff\xff\xff\xff"],
        [b"1", msgspec.msgpack.encode({"type": "Commit", "step": 1, "more": 1})],
        *([b"1", codec.encode(Lease(0, "rl", 1, 0, wait_s))] for wait_s in (math.nan, math.inf, -1.0)),
        [b"1", msgspec.msgpack.encode({"type": "Commit", "step": 1}).replace(b"Commit", b"\xff\xfemmit")],
        [b"1", msgspec.msgpack.encode({"type": "Done"})],
        [b"1", msgspec.msgpack.encode({"type": "Commit", "step": 1}), b"extra"],
    ],
)
def test_malformed_requests_are_refused_and_the_server_goes_on(frames: list[bytes]) -> None:
    with Running(_done) as running, zmq.Context() as context:
        with _raw(running.rendezvous, context) as raw:
            raw.send_multipart(frames)
            number, reply = raw.recv_multipart()
            assert number == frames[0]
            refused = codec.decode_reply(reply)
            assert refused.kind == "ProtocolError"
        with closing(Client(running.rendezvous, "t")) as client:
            assert client.ask(HELLO, 20)[0] == Done()


def test_an_oversize_frame_disconnects_its_sender_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_server, "MAX_FRAME_BYTES", 1 << 16)
    with Running(_done) as to, closing(Client(to.rendezvous, "big")) as big, closing(Client(to.rendezvous, "t")) as client:
        with pytest.raises(WaitTimeout, match="connection was lost"):
            big.ask(WorkerFetch({f"{i:08}": Place(1, i) for i in range(20_000)}), 20)
        assert client.ask(HELLO, 20)[0] == Done()


def test_wrong_client_key_is_refused_and_the_error_names_the_controller() -> None:
    with Running(_done) as running:
        public, secret = zmq.curve_keypair()
        wrong = msgspec.structs.replace(running.rendezvous, local_dir="", client_public=public.decode(), client_secret=secret.decode())
        begin = time.monotonic()
        with closing(Client(wrong, "t")) as client, pytest.raises(WaitTimeout, match="rejected our key") as caught:
            client.ask(HELLO, 60)
        assert time.monotonic() - begin < 20
        assert running.rendezvous.address in str(caught.value)


def test_a_plain_client_without_encryption_gets_nothing() -> None:
    asked: list[Request] = []

    async def handler(request: Request) -> Answer:
        asked.append(request)
        return Done()

    with Running(handler) as running, zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger, raw.rcvtimeo = 0, 500
        raw.connect(running.rendezvous.address)
        raw.send_multipart([b"1", codec.encode(Commit(0))])
        with pytest.raises(zmq.Again):
            raw.recv_multipart()
        assert asked == []


def test_the_last_reply_leaves_before_the_server_closes() -> None:
    async def main() -> None:
        said = asyncio.Event()

        async def handler(request: Request) -> Answer:
            said.set()
            return Done(), [bytes(32 << 20)]

        server = Server(handler)
        to = await server.start()
        serving = asyncio.ensure_future(server.serve())
        with closing(Client(to, "t")) as client:
            asking = asyncio.ensure_future(asyncio.to_thread(client.ask, Goodbye(0, True), 20))
            await said.wait()
            await asyncio.sleep(0)
            serving.cancel()
            await server.close()
            assert (await asking)[0] == Done()

    asyncio.run(main())


def test_a_taken_port_is_the_users_error_with_a_hint() -> None:
    async def main(port: int) -> None:
        async with Server(_done, port=port) as server:
            await server.start()

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port}: got in use on 127.0.0.1"):
            asyncio.run(main(port))


# ---------------------------------------------------------------- rendezvous file


def test_rendezvous_file_is_private_atomic_and_read_back(tmp_path: Path) -> None:
    with Running(_done) as running:
        path = keys.write(tmp_path / "run", running.rendezvous)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert list(path.parent.iterdir()) == [path]
        assert keys.read(tmp_path / "run", 20) == running.rendezvous
        secret = running.rendezvous.client_secret
        assert secret not in repr(running.rendezvous)
        keys.remove(tmp_path / "run", running.rendezvous)
        assert not path.exists()


def test_read_passes_over_the_file_of_a_controller_that_has_ended(tmp_path: Path) -> None:
    with Running(_done) as stale:
        keys.write(tmp_path, stale.rendezvous)
    with pytest.raises(WaitTimeout, match=rf"controller.*process {os.getpid()}.*nobody with its keys answers"):
        keys.read(tmp_path, 0.5)
    with Running(_done) as running:
        threading.Timer(0.3, keys.write, (tmp_path, running.rendezvous)).start()
        assert keys.read(tmp_path, 20) == running.rendezvous


def test_read_passes_over_a_file_whose_port_now_belongs_to_another_run(tmp_path: Path) -> None:
    with Running(_done) as other:
        keys.write(tmp_path, stranger(other.rendezvous.address))
        with pytest.raises(WaitTimeout, match="nobody with its keys answers"):
            keys.read(tmp_path, 1)


def test_read_says_when_there_is_no_file_or_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(WaitTimeout, match=r"controller.*does not exist"):
        keys.read(tmp_path, 0.1)
    (tmp_path / keys.FILE_NAME).write_text('{"address": 1')
    with pytest.raises(WaitTimeout, match="not a rendezvous file"):
        keys.read(tmp_path, 0.1)


def test_unreachable_controller_is_given_up_after_the_connect_time() -> None:
    begin, nowhere = time.monotonic(), stranger("tcp://127.0.0.1:1")
    with closing(Client(nowhere, "t", connect_s=0.3)) as client, pytest.raises(WaitTimeout, match="no connection"):
        client.ask(EnginesAsk(60), 600)
    assert time.monotonic() - begin < 20


def test_a_second_controller_of_a_run_directory_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with Running(_done) as running:
        keys.write(tmp_path, running.rendezvous)
        with pytest.raises(UserError, match=rf"{tmp_path}: got a second controller, .*process {os.getpid()} on "):
            keys.write(tmp_path, stranger("tcp://127.0.0.1:1"))
        assert keys.read(tmp_path, 20) == running.rendezvous


def test_one_that_was_first_meanwhile_is_found_before_its_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the file of a controller that has ended is asked about, another writes its own."""
    old, ours = (stranger(f"tcp://127.0.0.1:{port}") for port in (1, 2))
    keys.write(tmp_path, old)
    with Running(_done) as other:
        theirs, answers = msgspec.json.encode(other.rendezvous), keys.answers

        def slow(to: Rendezvous, timeout_s: float) -> bool:
            (tmp_path / keys.FILE_NAME).write_bytes(theirs)
            return answers(to, timeout_s)

        monkeypatch.setattr(keys, "answers", slow)
        with pytest.raises(UserError, match="second controller"):
            keys.write(tmp_path, ours)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [theirs]
