"""An engine that dies at any moment, or responds incorrectly, is lost: real sockets, and a server scripted by each test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asyncmoe.engines.pool import Pool
from asyncmoe.engines.sglang.client import SGLangClient
from asyncmoe.engines.sglang.generation import request_body
from asyncmoe.engines.succession import Succession
from asyncmoe.engines.takeover import EngineWeights
from asyncmoe.engines.types import EngineLost, Generation, Sampling
from asyncmoe.errors import EngineError, WaitTimeout
from asyncmoe.platform.sglang.packed_answers import MEDIA_TYPE
from asyncmoe.rollout.engine_lifecycle import EngineLifecycle
from asyncmoe.rpc.messages import EngineJoin
from asyncmoe.trajectory import Recording
from benchmarks.intake_server import VOCABULARY, http, reply_to
from tests.configs import demo
from tests.unit.fake_engine import FakeHandle, coordinator_of

Script = Sequence[bytes | float]
"""What a server sends: bytes, and seconds to wait. Then it resets the connection."""
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
SAMPLING = Sampling(1.0, 1, ())
DIES: dict[str, Script] = {
    "before it answers": [],
    "in a status line": [b"HTTP/1.1 20"],
    "in the headers": [HEAD],
    "in a body": [HEAD + b"content-length: 9\r\n\r\n{"],
    "in a chunk": [HEAD + b"transfer-encoding: chunked\r\n\r\n9\r\n{"],
    "and something else listens there": [b"SSH-2.0-OpenSSH\r\n\r\n"],
    "and what listens there sends no length": [HEAD + b"content-length: many\r\n\r\n{}"],
    "and what listens there sends no compression": [HEAD + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\n{}"],
}
CALLS: dict[str, Callable[[SGLangClient], Awaitable[object]]] = {
    "generate": lambda it: it.generate((1,), SAMPLING, "0", 20.0),
    "stream": lambda it: it.generate((1,), SAMPLING, "0", 20.0, listener=LISTENER),
    "score": lambda it: it.prompt_logprobs((1, 2), 20.0),
    "resume": lambda it: it.resume(),
    "abort": lambda it: it.abort(),
    "version": lambda it: it.weights_version(),
    "checksums": lambda it: it.checksums(20.0),
}
LISTENER: Any = SimpleNamespace(every=1, kept=None, live=True, hear=lambda tokens: False)


class Server:
    """Answers each request with its script; `lost` counts connections that the client closed while it waited."""

    def __init__(self, script: Script, first: Script = ()) -> None:
        self._script, self._first = script, first
        self.requests: list[tuple[bytes, bytes]] = []
        self.lost = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
                self.requests.append((head, await reader.readexactly(size)))
                script = self._first if self._first and len(self.requests) == 1 else self._script
                for piece in script:
                    if isinstance(piece, bytes):
                        writer.write(piece)
                        await writer.drain()
                    else:
                        with suppress(TimeoutError):
                            self.lost += await asyncio.wait_for(reader.read(1), piece) == b""
                if script is self._script:
                    break
        writer.transport.abort()

    @asynccontextmanager
    async def listening(self) -> Any:
        """Yield the address."""
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def run(self, use: Callable[[SGLangClient], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            async with self.listening() as url:
                client = SGLangClient("engine.7", url, key="k")
                try:
                    return await use(client)
                finally:
                    await client.close()

        return asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("when", list(DIES))
def test_whatever_an_engine_was_asked_it_is_lost_with_its_server(when: str) -> None:
    async def use(client: SGLangClient) -> None:
        assert not await client.ready()
        assert not await client.alive(5.0)
        for call in CALLS.values():
            with pytest.raises(EngineLost, match=r"engine\.7: /"):
                await call(client)

    Server(DIES[when]).run(use)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"\xff"', b"[" * 50_000, b'{"success": "yes", "meta_info": 1}'])
def test_an_answer_that_is_none_is_an_error_of_the_engine(body: bytes) -> None:
    async def use(client: SGLangClient) -> None:
        for name in CALLS.keys() - {"abort", "resume"}:
            with pytest.raises(EngineError, match=r"^engine\.7: "):
                await CALLS[name](client)

    Server([HEAD + b"content-length: %d\r\n\r\n" % len(body) + body, 0.2]).run(use)


@pytest.mark.parametrize("when", list(DIES))
@pytest.mark.parametrize("first", [b"", http(b"{}")], ids=["before it has joined", "while it is taken over"])
def test_an_engine_that_dies_while_it_comes_to_the_next_controller_ends_nothing_else(tmp_path: Path, when: str, first: bytes) -> None:
    config = demo(f"run.dir={tmp_path}", "engines.join=true")

    async def main() -> None:
        before = Succession(tmp_path)
        await before.note(EngineWeights(3, 0, True, "loading", 4, 0))
        pool, after = Pool([FakeHandle("engine.0")], 8, 5.0, lambda *_: None), Succession(tmp_path)
        lifecycle = EngineLifecycle(config, pool, coordinator_of(pool), after)
        server = Server(DIES[when], [first, 0.01] if first else ())
        async with server.listening() as url:
            request = EngineJoin("a", url, "k", "h", 1, 1, config.digest, served=before.controller)
            with pytest.raises(EngineError, match=r"^a"):
                await lifecycle.membership.handle(request)
        assert [member.engine.name for member in pool.present] == ["engine.0"]
        assert [member.engine.name for member in pool.members if member.fenced] == (["a"] if first else [])
        for one in (before, after):
            one.close()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("asyncmoe.engines.membership._REACH_S", 0.1)
        asyncio.run(asyncio.wait_for(main(), 60))


def test_what_an_engine_says_and_how_long_it_was_waited_for_is_named() -> None:
    refused = b'{"error":{"message":"The input is too long"}}'

    async def refuse(client: SGLangClient) -> None:
        with pytest.raises(EngineError, match=r"engine\.7: /generate: The input is too long"):
            await CALLS["generate"](client)

    server = Server([b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n" % len(refused) + refused])
    server.run(refuse)
    assert b"Authorization: Bearer k\r\n" in server.requests[0][0]

    async def wait(client: SGLangClient) -> None:
        """An abandoned request closes its connection, which tells an engine to stop."""
        with pytest.raises(WaitTimeout, match=r"engine\.7"):
            await client.generate((1,), SAMPLING, "0", 0.1)
        waits = asyncio.ensure_future(client.generate((1,), SAMPLING, "0", 20.0))
        while len(silent.requests) < 2:
            await asyncio.sleep(0.01)
        await client.close()
        for call in (waits, CALLS["generate"](client), CALLS["stream"](client)):
            with pytest.raises(EngineLost):
                await call
        while silent.lost < 2:
            await asyncio.sleep(0.01)

    silent = Server([5.0])
    silent.run(wait)


@pytest.mark.parametrize("kind", ["application/json", MEDIA_TYPE])
@pytest.mark.parametrize("new", [6, 40_000])
def test_answers_are_read_in_either_form(kind: str, new: int) -> None:
    sampling = Sampling(1.0, new, (), recording=Recording(vocabulary=VOCABULARY))
    body = msgspec.json.encode(request_body((1,), sampling, "0", 0, None))
    server = Server([http(reply_to(body, 0, kind), kind), 5.0])

    async def use(client: SGLangClient) -> Generation:
        return await client.generate((1,), sampling, "0", 60.0)

    made = server.run(use)
    wanted = json.loads(reply_to(body, 0))
    assert made.tokens.tolist() == wanted["output_ids"]
    assert made.logprobs.tolist() == [value for value, _, _ in wanted["meta_info"]["output_token_logprobs"]]
    assert MEDIA_TYPE.encode() in server.requests[0][0]
