"""Connections to an engine whose replies are read into one buffer each: real sockets, and a server that sends what a test says."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.engines import turnstile
from asyncmoe.engines.sglang import replies
from asyncmoe.engines.sglang.client import SGLangClient
from asyncmoe.engines.sglang.generation import request_body
from asyncmoe.engines.sglang.replies import HEAD_BYTES, MOST_BYTES, HttpReply, KeptConnections, ReplyHead, read_head
from asyncmoe.engines.types import EngineLost, Generation, Sampling
from asyncmoe.errors import EngineError, WaitTimeout
from asyncmoe.platform.sglang.packed_answers import MEDIA_TYPE
from asyncmoe.trajectory import Recording
from benchmarks.intake_server import VOCABULARY, http, reply_to
from tests.unit.example_counts import examples

HEAD = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\nContent-Type: Application/JSON; charset=utf-8\r\ncontent-length: %d\r\n\r\n"


class Server:
    """Answers each request with the next of its scripts: pieces of bytes, seconds to wait, or None, which closes the connection.

    Attributes:
        requests: what came: head and body.
        connections: their number.
        lost: connections that the client closed while a script waited.
    """

    def __init__(self, *scripts: Sequence[bytes | float | None]) -> None:
        self._scripts = iter(scripts)
        self.requests: list[tuple[bytes, bytes]] = []
        self.connections = self.lost = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.requests.append((head, await reader.readexactly(size)))
                for piece in next(self._scripts):
                    if isinstance(piece, bytes):
                        writer.write(piece)
                        await writer.drain()
                        await asyncio.sleep(0)
                    elif piece is None:
                        writer.close()
                        return
                    else:
                        with suppress(TimeoutError):
                            self.lost += await asyncio.wait_for(_ends(reader), piece)
        writer.close()

    def run(self, use: Callable[[KeptConnections, str], Awaitable[Any]], idle_s: float = 5.0) -> Any:
        """Run `use(connections, url)`."""

        async def main() -> Any:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            kept = KeptConnections(url, {"Accept": "x/y"}, idle_s)
            try:
                return await use(kept, url)
            finally:
                kept.close()
                server.close()

        return asyncio.run(main())


async def _ends(reader: asyncio.StreamReader) -> bool:
    try:
        return not await reader.read(1)
    except ConnectionError:
        return True


def asked(*scripts: Sequence[bytes | float | None], seconds: float = 20.0) -> HttpReply:
    async def use(kept: KeptConnections, url: str) -> HttpReply:
        return await kept.post("/generate", b"{}", seconds)

    made: HttpReply = Server(*scripts).run(use)
    return made


@settings(deadline=None, max_examples=examples(40))
@given(st.binary(max_size=300) | st.integers(HEAD_BYTES - 200, 400_000).map(bytes), st.lists(st.integers(0, 500), max_size=4))
def test_a_reply_is_what_was_sent_however_it_was_cut(body: bytes, cuts: list[int]) -> None:
    sent = HEAD % len(body) + body
    places = [0, *sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
    reply = asked([sent[a:b] for a, b in pairwise(places)])
    assert (reply.status, reply.kind, bytes(reply.body)) == (200, "application/json", body)
    assert reply.body.readonly


def test_a_connection_is_used_again_and_replies_stay_as_they_were() -> None:
    bodies = [bytes([number]) * 100_000 for number in range(4)]
    server = Server(*([HEAD % len(body) + body] for body in bodies))

    async def use(kept: KeptConnections, url: str) -> list[HttpReply]:
        return [await kept.post("/generate", body[: number + 1], 20.0) for number, body in enumerate(bodies)]

    assert [bytes(reply.body) for reply in server.run(use)] == bodies
    assert server.connections == 1
    assert [body for _, body in server.requests] == [bodies[number][: number + 1] for number in range(4)]
    head = server.requests[0][0].decode()
    assert head.startswith("POST /generate HTTP/1.1\r\nHost: 127.0.0.1:")
    assert "\r\nAccept: x/y\r\n" in head


def test_a_large_reply_is_read_over_many_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop reads a socket until it is empty. The kernel has all that a socket can hold before a turn, and more comes meanwhile."""
    monkeypatch.setattr(turnstile, "BUDGET_S", 0.0)
    size = 24 << 20
    answered = threading.Event()
    read: Counter[int] = Counter()

    def answer(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(HEAD % size + bytes(size))
            answered.wait(20.0)

    async def use(port: int) -> HttpReply:
        loop, turn = asyncio.get_running_loop(), 0

        def tick() -> None:
            nonlocal turn
            turn += 1
            loop.call_soon(tick)

        updated = replies._Connection.buffer_updated

        def noted(connection: replies._Connection, nbytes: int) -> None:
            read[turn] += nbytes
            updated(connection, nbytes)

        monkeypatch.setattr(replies._Connection, "buffer_updated", noted)
        tick()
        kept = KeptConnections(f"http://127.0.0.1:{port}", {}, 5.0)
        try:
            return await kept.post("/generate", b"{}", 20.0)
        finally:
            kept.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=answer, args=(listening,))
        server.start()
        try:
            reply = uvloop.run(use(listening.getsockname()[1]))
        finally:
            answered.set()
            server.join(20.0)
    assert len(reply.body) == size
    assert max(read.values()) <= replies._AT_ONCE + replies._LITTLE


def test_requests_at_a_time_have_connections_of_their_own() -> None:
    server = Server(*([0.05, HEAD % 1 + b"x"] for _ in range(20)))

    async def use(kept: KeptConnections, url: str) -> None:
        await asyncio.gather(*(kept.post("/generate", b"", 20.0) for _ in range(10)))
        await asyncio.gather(*(kept.post("/generate", b"", 20.0) for _ in range(10)))

    server.run(use)
    assert server.connections == 10


@pytest.mark.parametrize(
    "last",
    [
        pytest.param([b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 1\r\n\r\nx"], id="it says that it closes"),
        pytest.param([b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\nx"], id="HTTP/1.0"),
        pytest.param([HEAD % 1 + b"x", None], id="it closes"),
        pytest.param([HEAD % 1 + b"x", 0.05, b"more"], id="it sends what nobody asked for"),
    ],
)
def test_a_connection_that_the_server_gives_up_is_not_used_again(last: list[bytes | float | None]) -> None:
    server = Server(last, [HEAD % 1 + b"y"])

    async def use(kept: KeptConnections, url: str) -> list[bytes]:
        first = await kept.post("/generate", b"", 20.0)
        await asyncio.sleep(0.15)
        return [bytes(first.body), bytes((await kept.post("/generate", b"", 20.0)).body)]

    assert server.run(use) == [b"x", b"y"]
    assert server.connections == 2


def test_idle_connections_are_closed_though_nobody_asks_again() -> None:
    server = Server([HEAD % 0, 5.0])

    async def use(kept: KeptConnections, url: str) -> None:
        await kept.post("/generate", b"", 20.0)
        while not server.lost:
            await asyncio.sleep(0.01)

    server.run(use, idle_s=0.05)


def test_a_request_that_is_given_up_closes_its_connection() -> None:
    """By that an engine knows that it need not go on."""
    server = Server([5.0], [b"HTTP/1.1 200 OK\r\n", 5.0])

    async def use(kept: KeptConnections, url: str) -> None:
        with pytest.raises(TimeoutError):
            await kept.post("/generate", b"", 0.1)
        task = asyncio.create_task(kept.post("/generate", b"", 20.0))
        while len(server.requests) < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while server.lost < 2:
            await asyncio.sleep(0.01)

    server.run(use)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ([None], "the server closed the connection"),
        ([b"HTTP/1.1 200", None], "the server closed the connection"),
        ([HEAD % 9 + b"12345678", None], "the server closed the connection"),
        ([HEAD % 1 + b"xy"], "got 2 bytes of a reply, expected 1"),
        ([b"HTTP/1.1 200 OK\r\nx: " + b"y" * HEAD_BYTES], "got no end of the headers of a reply within 8192 bytes"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "begins with 'SSH-2.0-OpenSSH'"),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"], "of length 'chunked', expected a Content-Length"),
    ],
)
def test_an_engine_that_does_not_answer_is_lost(script: list[bytes | None], says: str) -> None:
    async def use(kept: KeptConnections, url: str) -> None:
        client = SGLangClient("engine.7", url)
        try:
            with pytest.raises(EngineLost, match=f"engine.7: /generate: .*{says}"):
                await client.generate((1,), Sampling(1.0, 1, ()), "0", 20.0)
        finally:
            await client.close()

    Server(script).run(use)


def test_what_an_engine_says_and_how_long_it_was_waited_for_is_named() -> None:
    refused = b'{"error":{"message":"The input is too long"}}'
    server = Server([b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n" % len(refused) + refused], [HEAD % 2 + b"{}"], [5.0], [5.0])

    async def use(kept: KeptConnections, url: str) -> None:
        client = SGLangClient("engine.7", url, key="k")

        def generate(seconds: float) -> Awaitable[Any]:
            return client.generate((1,), Sampling(1.0, 1, ()), "0", seconds)

        with pytest.raises(EngineError, match=r"engine\.7: /generate: The input is too long"):
            await generate(20.0)
        with pytest.raises(EngineError, match=r"engine\.7: /generate: unexpected answer"):
            await generate(20.0)
        with pytest.raises(WaitTimeout, match=r"engine\.7"):
            await generate(0.1)
        waits = asyncio.ensure_future(generate(20.0))
        while len(server.requests) < 4:
            await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(EngineLost, match="the connections are closed"):
            await waits
        with pytest.raises(EngineLost, match="its connections are closed"):
            await generate(20.0)

    server.run(use)
    assert b"\r\nAuthorization: Bearer k\r\n" in server.requests[0][0]


@pytest.mark.parametrize("kind", ["application/json", MEDIA_TYPE])
@pytest.mark.parametrize("new", [6, 40_000])
def test_answers_are_read_in_either_form(kind: str, new: int) -> None:
    """40,000 tokens are more than a megabyte of JSON, which is read in a thread."""
    sampling = Sampling(1.0, new, (), recording=Recording(vocabulary=VOCABULARY))
    body = msgspec.json.encode(request_body((1,), sampling, "0", 0, None))
    server = Server([http(reply_to(body, 0, kind), kind)])

    async def use(kept: KeptConnections, url: str) -> Generation:
        client = SGLangClient("engine.7", url)
        try:
            return await client.generate((1,), sampling, "0", 60.0)
        finally:
            await client.close()

    made = server.run(use)
    wanted = json.loads(reply_to(body, 0))
    assert made.tokens.tolist() == wanted["output_ids"]
    assert made.logprobs.tolist() == [value for value, _, _ in wanted["meta_info"]["output_token_logprobs"]]
    assert MEDIA_TYPE.encode() in server.requests[0][0]


def test_an_engine_that_is_not_there_is_lost() -> None:
    async def use(kept: KeptConnections, url: str) -> None:
        client = SGLangClient("engine.7", "http://127.0.0.1:1")
        with pytest.raises(EngineLost, match=r"engine\.7: /generate: cannot connect to 127.0.0.1:1"):
            await client.generate((1,), Sampling(1.0, 1, ()), "0", 20.0)
        await client.close()

    Server().run(use)


def test_heads() -> None:
    assert read_head(b"HTTP/1.1 204\r\nContent-Length:0") == ReplyHead(204, "", 0, True)
    assert read_head(b"HTTP/1.0 200 OK\r\nx: a: b\r\nCONTENT-LENGTH:  7 ") == ReplyHead(200, "", 7, False)
    assert read_head(b"HTTP/1.1 200 OK\r\nConnection: Keep-Alive\r\ncontent-length: %d" % MOST_BYTES).kept


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"HTTP/2 200 OK\r\ncontent-length: 1",
        b"HTTP/1.1 100 Continue\r\ncontent-length: 1",
        b"HTTP/1.1 20x OK\r\ncontent-length: 1",
        b"HTTP/1.1 2000 OK\r\ncontent-length: 1",
        b"HTTP/1.1 200 OK",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1_0",
        b"HTTP/1.1 200 OK\r\ncontent-length: \xb2",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\nContent-Length: 2",
        b"HTTP/1.1 200 OK\r\ncontent-length : 1",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\nfolded",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\nTransfer-Encoding: chunked",
        b"HTTP/1.1 200 OK\r\ncontent-length: %d" % (MOST_BYTES + 1),
    ],
)
def test_heads_of_another_form_are_refused(head: bytes) -> None:
    with pytest.raises(ConnectionError):
        read_head(head)


@pytest.mark.parametrize("url", ["https://h:1", "http://h", "h:1", ""])
def test_an_address_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected http://host:port"):
        KeptConnections(url, {}, 5.0)
