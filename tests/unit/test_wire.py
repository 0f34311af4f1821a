"""The wire with real sockets: one server in a thread with its own loop, clients in the test."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from asyncmoe import errors
from asyncmoe.errors import ConfigError, EngineError, InvariantBroken, ProtocolError, TrajectoryRejected, UserError, WaitTimeout
from asyncmoe.rpc import codec, keys
from asyncmoe.rpc import server as server_module
from asyncmoe.rpc.client import Client, rebuild
from asyncmoe.rpc.connection import Connection
from asyncmoe.rpc.messages import Commit, Done, EnginesAsk, Fetched, Goodbye, Hello, Lease, Leased, Refused, Reply, Request, Welcome
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.rpc.server import Server
from asyncmoe.rpc.worker_messages import WorkerFetch
from asyncmoe.trajectory import Buffer

Answer = Reply | tuple[Reply, list[Buffer]]


class Running:
    """A server on its own thread; `ended` holds what `serve` raised."""

    def __init__(self, handler: Callable[[Request], Awaitable[Answer]]) -> None:
        self.ended: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(handler)), daemon=True)
        self._thread.start()
        assert self._started.wait(10)

    async def _main(self, handler: Callable[[Request], Awaitable[Answer]]) -> None:
        async with Server(handler) as server:
            self.rendezvous = await server.start()
            self._loop, self._serving = asyncio.get_running_loop(), asyncio.ensure_future(server.serve())
            self._started.set()
            try:
                await self._serving
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
                self.ended = error

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self.join()

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()


@contextmanager
def served(handler: Callable[[Request], Awaitable[Answer]]) -> Iterator[Running]:
    running = Running(handler)
    try:
        yield running
    finally:
        running.stop()


async def _done(request: Request) -> Answer:
    return Done()


HELLO = Hello(0, 1, "digest", 0)
LEASE = Lease(0, "rl", 1, 0, 60.0)


def test_reply_and_frames_arrive_unchanged() -> None:
    big, small, empty = np.arange(300_000, dtype="<i4"), b"\x00\x01", b""

    async def handler(request: Request) -> Answer:
        assert request == WorkerFetch(("a", "b"), ())
        return Fetched(), [big.data.cast("B"), small, empty]

    with served(handler) as running, Client(running.rendezvous, "t") as client:
        reply, frames = client.ask(WorkerFetch(("a", "b"), ()), 20)
    assert reply == Fetched()
    assert [bytes(f) for f in frames] == [big.tobytes(), small, empty]
    assert memoryview(frames[0]).readonly


def test_an_answer_that_all_ranks_get_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [Leased(step, (), queue_depth=step, dropped={}) for step in range(2)]
    encoded: list[int] = []

    def encode(message: Leased, most: int) -> bytes:
        encoded.append(message.step)
        return codec.encode(message, most)

    monkeypatch.setattr(server_module, "encode", encode)

    async def handler(request: Request) -> Answer:
        assert isinstance(request, Lease)
        return answers[request.step]

    with served(handler) as running, Client(running.rendezvous, "rank 0") as client:
        for step in (0, 0, 0, 1, 1, 0):
            assert client.ask(Lease(step, "rl", 1, version=0, wait_s=0.0), 10)[0] == answers[step]
    assert encoded == [0, 1, 0]


def test_a_slow_lease_holds_up_nobody() -> None:
    release = threading.Event()

    async def handler(request: Request) -> Answer:
        if isinstance(request, Lease):
            while not release.is_set():
                await asyncio.sleep(0.01)
            return Leased(0, (), 0, {})
        return Fetched(), []

    with served(handler) as to, ThreadPoolExecutor(1) as pool, Client(to.rendezvous, "slow") as slow, Client(to.rendezvous, "fast") as fast:
        leasing = pool.submit(slow.ask, LEASE, 20)
        for _ in range(20):
            fast.ask(WorkerFetch((), ()), 20)
        assert not leasing.done()
        release.set()
        assert leasing.result(20)[0] == Leased(0, (), 0, {})


def test_a_late_reply_is_not_taken_for_the_next() -> None:
    async def handler(request: Request) -> Answer:
        assert isinstance(request, Commit)
        await asyncio.sleep(0.4 if request.step == 1 else 0)
        return Leased(request.step, (), 0, {})

    with served(handler) as running, Client(running.rendezvous, "t") as client:
        client.ask(Commit(0), 20)
        with pytest.raises(WaitTimeout, match=r"t asked Commit: no reply"):
            client.ask(Commit(1), 0.1)
        time.sleep(0.5)
        assert client.ask(Commit(2), 20)[0] == Leased(2, (), 0, {})


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ProtocolError("out of turn"), ProtocolError),
        (EngineError("engine 0 died"), EngineError),
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

    with served(handler) as running, Client(running.rendezvous, "t") as client:
        with pytest.raises(kind) as caught:
            client.ask(HELLO, 20)
        assert type(caught.value) is kind
        assert str(caught.value) == str(raised)
        if kind is TrajectoryRejected:
            assert caught.value.reason == "bad_reward"  # type: ignore[attr-defined]
        if kind is WaitTimeout:
            assert (caught.value.whom, caught.value.what, caught.value.seconds) == ("engine 0", "health", 3.0)  # type: ignore[attr-defined]
        assert client.ask(Commit(0), 20)[0] == Done()


def test_an_error_class_of_ours_derived_elsewhere_crosses_as_its_parent() -> None:
    class Odd(EngineError):
        pass

    async def handler(request: Request) -> Answer:
        raise Odd("odd")

    with served(handler) as running, Client(running.rendezvous, "t") as client, pytest.raises(EngineError, match=r"^odd$"):
        client.ask(HELLO, 20)


@pytest.mark.parametrize("kind", ["KeyError", "os", "annotations", "__builtins__", "Exception"])
def test_an_unknown_kind_becomes_a_protocol_error_that_names_it(kind: str) -> None:
    error = rebuild(Refused(kind, "text"))
    assert type(error) is ProtocolError
    assert kind in str(error)
    assert "text" in str(error)


def test_every_error_class_can_be_rebuilt() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.AsyncmoeError)]
    assert len(classes) >= 9
    for kind in classes:
        error = rebuild(Refused(kind.__name__, "what: got 1, expected 2"))
        assert type(error) is kind
        assert str(error) == "what: got 1, expected 2"
        if isinstance(error, UserError):
            assert error.hint is None


@pytest.mark.parametrize("raised", [KeyError("broken"), InvariantBroken("counts")])
def test_a_bug_of_the_handler_reaches_the_client_and_ends_serve(raised: Exception) -> None:
    async def handler(request: Request) -> Answer:
        if isinstance(request, Commit):
            raise raised
        await asyncio.sleep(60)
        return Done()

    with served(handler) as running, Client(running.rendezvous, "t") as client, Client(running.rendezvous, "other") as other:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(other.ask, LEASE, 30)
            time.sleep(0.2)
            with pytest.raises(InvariantBroken):
                client.ask(Commit(0), 20)
            with pytest.raises(WaitTimeout, match="connection was lost"):
                waiting.result(20)
        running.join()
        assert running.ended is raised


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
        [b"1", b"\xc1"],
        [b"1", b"\x91" * 50_000],
        [b"1", b"\x82\xa1a" + b"\x91" * 50_000],
        [b"1", b"\xdd\xff\xff\xff\xff"],
        [b"1", msgspec.msgpack.encode({"type": "Commit", "step": "one"})],
        [b"1", msgspec.msgpack.encode({"type": "Commit", "step": 1, "more": 1})],
        [b"1", msgspec.msgpack.encode({"type": "Nonsense"})],
        [b"1", msgspec.msgpack.encode({"type": "Commit", "step": 1}).replace(b"Commit", b"\xff\xfemmit")],
        [b"1", msgspec.msgpack.encode({"type": "Done"})],
        [b"1", msgspec.msgpack.encode({"type": "Commit", "step": 1}), b"extra"],
    ],
)
def test_malformed_requests_are_refused_and_the_server_goes_on(frames: list[bytes]) -> None:
    with served(_done) as running, zmq.Context() as context:
        with _raw(running.rendezvous, context) as raw:
            raw.send_multipart(frames)
            number, reply = raw.recv_multipart()
            assert number == frames[0]
            refused = codec.decode_reply(reply)
            assert isinstance(refused, Refused)
            assert refused.kind == "ProtocolError"
        with Client(running.rendezvous, "t") as client:
            assert client.ask(HELLO, 20)[0] == Done()


def test_an_oversize_frame_disconnects_its_sender_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with Server(_done, max_frame_bytes=1 << 16) as server:
            to = await server.start()
            serving = asyncio.ensure_future(server.serve())
            with Client(to, "big") as big, Client(to, "t") as client:
                request = WorkerFetch(tuple(f"{i:08}" for i in range(20_000)), ())
                with pytest.raises(WaitTimeout, match="connection was lost"):
                    await asyncio.to_thread(big.ask, request, 20)
                assert (await asyncio.to_thread(client.ask, HELLO, 20))[0] == Done()
            serving.cancel()

    asyncio.run(main())


def test_a_request_larger_than_the_server_takes_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="expected at most 100"):
        codec.encode(WorkerFetch(tuple("k" * 9 for _ in range(20)), ()), 100)


def test_a_dead_controller_is_noticed_long_before_the_timeout() -> None:
    async def handler(request: Request) -> Answer:
        await asyncio.sleep(60)
        return Done()

    running = Running(handler)
    with Client(running.rendezvous, "trainer.3") as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.ask, LEASE, 600)
        time.sleep(0.3)
        running.stop()
        begin = time.monotonic()
        with pytest.raises(WaitTimeout, match=r"trainer\.3 asked Lease: the connection was lost") as caught:
            waiting.result(30)
        assert time.monotonic() - begin < 20
        assert running.rendezvous.address in str(caught.value)


class _Closing:
    """A socket that notes its readiness when it is closed."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket, self.ready = socket, -1

    def __getattr__(self, name: str) -> object:
        return getattr(self._socket, name)

    def close(self, linger: int) -> None:
        self.ready = self._socket.getsockopt(zmq.EVENTS)
        self._socket.close(linger)


def test_a_closed_connection_never_leaves_libzmq_both_ends_of_its_monitor() -> None:
    with served(_done) as running:
        connection = Connection(running.rendezvous)
        assert connection._monitor.poll(10_000)  # an event that nobody has read
        monitor = _Closing(connection._monitor)
        connection._monitor = monitor  # type: ignore[assignment]
        connection.close()
        assert monitor.ready == 0
        assert connection.socket.closed


def test_wrong_client_key_is_refused_and_the_error_names_the_controller() -> None:
    with served(_done) as running:
        public, secret = zmq.curve_keypair()
        wrong = msgspec.structs.replace(running.rendezvous, local_dir="", client_public=public.decode(), client_secret=secret.decode())
        begin = time.monotonic()
        with Client(wrong, "t") as client, pytest.raises(WaitTimeout, match="rejected our key") as caught:
            client.ask(HELLO, 60)
        assert time.monotonic() - begin < 20
        assert running.rendezvous.address in str(caught.value)


def test_a_second_process_with_a_wrong_key_gets_no_reply_and_a_right_one_does() -> None:
    asked: list[Request] = []

    async def handler(request: Request) -> Answer:
        asked.append(request)
        return Done()

    program = (
        "import sys, msgspec\n"
        "from asyncmoe.rpc.rendezvous import Rendezvous\n"
        "from asyncmoe.rpc.client import Client\n"
        "from asyncmoe.rpc.messages import Commit\n"
        "to = msgspec.json.decode(sys.stdin.buffer.read(), type=Rendezvous)\n"
        "with Client(to, 'other') as client: print(client.ask(Commit(7), 2))\n"
    )

    def ask(to: Rendezvous) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([sys.executable, "-c", program], input=msgspec.json.encode(to), capture_output=True, timeout=30, check=False)

    with served(handler) as running:
        wrong_server = msgspec.structs.replace(running.rendezvous, local_dir="", server_public=zmq.curve_keypair()[0].decode())
        failed = ask(wrong_server)
        assert failed.returncode != 0
        assert b"ConnectionGone" in failed.stderr
        assert running.rendezvous.address.encode() in failed.stderr
        assert asked == []
        assert b"Done()" in ask(running.rendezvous).stdout
        assert asked == [Commit(7)]


def test_a_plain_client_without_encryption_gets_nothing() -> None:
    asked: list[Request] = []

    async def handler(request: Request) -> Answer:
        asked.append(request)
        return Done()

    with served(handler) as running, zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger, raw.rcvtimeo = 0, 500
        raw.connect(running.rendezvous.address)
        raw.send_multipart([b"1", codec.encode(Commit(0))])
        with pytest.raises(zmq.Again):
            raw.recv_multipart()
        assert asked == []


def test_many_clients_at_once() -> None:
    async def handler(request: Request) -> Answer:
        assert isinstance(request, Commit)
        await asyncio.sleep(0.001 * (request.step % 7))
        return Leased(request.step, (), 0, {})

    def ask_many(name: int) -> bool:
        with Client(running.rendezvous, str(name)) as client:
            return all(client.ask(Commit(i), 10)[0] == Leased(i, (), 0, {}) for i in range(name * 100, name * 100 + 30))

    with served(handler) as running, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask_many, range(8)))


def test_the_last_reply_leaves_before_the_server_closes() -> None:
    async def main() -> None:
        said = asyncio.Event()

        async def handler(request: Request) -> Answer:
            said.set()
            return Done(), [bytes(32 << 20)]

        server = Server(handler)
        to = await server.start()
        serving = asyncio.ensure_future(server.serve())
        with Client(to, "t") as client:
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
        with pytest.raises(UserError, match=rf"port {port}: got in use on 127.0.0.1, expected a free port; choose"):
            asyncio.run(main(port))


def test_an_address_that_is_not_ours_is_the_users_error() -> None:
    async def main() -> None:
        async with Server(_done, host="192.0.2.1") as server:
            await server.start()

    with pytest.raises(UserError, match=r"address 192\.0\.2\.1:0"):
        asyncio.run(main())


# ---------------------------------------------------------------- rendezvous file


def test_rendezvous_file_is_private_atomic_and_read_back(tmp_path: Path) -> None:
    with served(_done) as running:
        path = keys.write(tmp_path / "run", running.rendezvous)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert list(path.parent.iterdir()) == [path]
        assert keys.read(tmp_path / "run", 20) == running.rendezvous
        secret = running.rendezvous.client_secret
        assert secret not in repr(running.rendezvous)
        keys.remove(tmp_path / "run", running.rendezvous)
        assert not path.exists()


def test_remove_leaves_the_file_of_a_newer_controller(tmp_path: Path) -> None:
    old, new = (keys.rendezvous(f"tcp://127.0.0.1:{port}", keys.generate()) for port in (1, 2))
    path = keys.write(tmp_path, new)
    keys.remove(tmp_path, old)
    assert path.exists()


def test_read_waits_for_the_file(tmp_path: Path) -> None:
    with served(_done) as running:
        threading.Timer(0.3, keys.write, (tmp_path, running.rendezvous)).start()
        assert keys.read(tmp_path, 20) == running.rendezvous


def test_read_passes_over_the_file_of_a_controller_that_has_ended(tmp_path: Path) -> None:
    stale = Running(_done)
    keys.write(tmp_path, stale.rendezvous)
    stale.stop()
    with pytest.raises(WaitTimeout, match=rf"controller.*process {os.getpid()}.*nobody with its keys answers"):
        keys.read(tmp_path, 0.5)
    with served(_done) as running:
        threading.Timer(0.3, keys.write, (tmp_path, running.rendezvous)).start()
        assert keys.read(tmp_path, 20) == running.rendezvous


def test_read_passes_over_a_file_whose_port_now_belongs_to_another_run(tmp_path: Path) -> None:
    with served(_done) as other:
        keys.write(tmp_path, keys.rendezvous(other.rendezvous.address, keys.generate()))
        with pytest.raises(WaitTimeout, match="nobody with its keys answers"):
            keys.read(tmp_path, 1)


def test_read_says_when_there_is_no_file_or_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(WaitTimeout, match=r"controller.*does not exist"):
        keys.read(tmp_path, 0.1)
    (tmp_path / keys.FILE_NAME).write_text('{"address": 1')
    with pytest.raises(WaitTimeout, match="not a rendezvous file"):
        keys.read(tmp_path, 0.1)


def test_secrets_do_not_show(tmp_path: Path) -> None:
    made = keys.generate()
    assert made.server_secret.decode() not in repr(made)
    assert made.server_secret.decode() not in keys.write(tmp_path, keys.rendezvous("tcp://127.0.0.1:1", made)).read_text()
    assert replace(made, server_public=b"x") != made


def test_unreachable_controller_is_given_up_after_the_connect_time() -> None:
    begin, nowhere = time.monotonic(), keys.rendezvous("tcp://127.0.0.1:1", keys.generate())
    with Client(nowhere, "t", connect_s=0.3) as client, pytest.raises(WaitTimeout, match="no connection"):
        client.ask(EnginesAsk(60), 600)
    assert time.monotonic() - begin < 20


def test_welcome_round_trip() -> None:
    assert codec.decode_reply(codec.encode(Welcome("r"))) == Welcome("r")
