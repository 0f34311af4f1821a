"""A stand-in for an SGLang 0.5.23 server in a separate process: serves `/generate` with prerendered replies.

A reply has exactly the fields of a real one (tests/engine/test_intake.py compares the two), with random tokens and experts. It is
packed, as by asyncmoe's engines, if the request accepts that.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import sys
from random import Random
from typing import Any

import numpy as np

from asyncmoe.platform.sglang.packed_answers import MEDIA_TYPE, packed
from asyncmoe.trajectory import encode_routes
from asyncmoe.trajectory.sent_routes import to_bytes
from benchmarks.routes import ROUTING, drawn

VOCABULARY = 151_936
_DIFFERENT = 4
"""Number of replies of one shape, used in rotation."""
_DRAWN = 512
"""Rows of randomly drawn experts; longer routes repeat them."""


class _Engine(asyncio.Protocol):
    """One connection.

    Args:
        delay_s: time from a request to its reply, plus or minus half of it.
    """

    def __init__(self, delay_s: float, random: Random) -> None:
        self._delay_s, self._random, self._buffer = delay_s, random, bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end]).lower()
            size = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            if len(self._buffer) < end + 4 + size:
                return
            body = bytes(self._buffer[end + 4 : end + 4 + size])
            del self._buffer[: end + 4 + size]
            kind = MEDIA_TYPE if body and MEDIA_TYPE.encode() in head else "application/json"
            answer = http(reply_to(body, self._random.randrange(_DIFFERENT), kind) if body else b"{}", kind)
            if self._delay_s:
                asyncio.get_running_loop().call_later(self._delay_s * (0.5 + self._random.random()), self._write, answer)
            else:
                self._write(answer)

    def _write(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)


def http(body: bytes, kind: str = "application/json") -> bytes:
    """Return a response with this body, with headers like uvicorn's."""
    head = f"HTTP/1.1 200 OK\r\ndate: x\r\nserver: uvicorn\r\ncontent-length: {len(body)}\r\ncontent-type: {kind}\r\n\r\n"
    return head.encode() + body


def reply_to(body: bytes, number: int, kind: str = "application/json") -> bytes:
    """Return one of the replies to a request, in the given media type."""
    prompt = body[body.index(b'"input_ids":[') : body.index(b"]")].count(b",") + 1
    new, routed = _number(body, b'"max_new_tokens":'), _number(body, b'"routed_experts_start_len":')
    rows = prompt + new - 1 - routed if b'"return_routed_experts":true' in body else 0
    if kind == MEDIA_TYPE:
        return _packed(new, rows, number)
    return rendered(new, rows, number).replace(b'"prompt_tokens":0', b'"prompt_tokens":%d' % prompt, 1)


def _number(body: bytes, name: bytes) -> int:
    at = body.index(name) + len(name)
    end = at
    while body[end : end + 1].isdigit():
        end += 1
    return int(body[at:end])


@functools.cache
def rendered(new: int, rows: int, number: int) -> bytes:
    """Return a reply of `new` tokens with `rows` rows of packed routes; 0: without routes."""
    random = np.random.default_rng((new, rows, number))
    tokens = random.integers(0, VOCABULARY, new).tolist()
    logprobs = [float(value) for value in -random.gamma(0.5, 1.0, new).astype(np.float32)]
    meta: dict[str, Any] = {
        "id": f"{number:032x}",
        "finish_reason": {"type": "length", "length": new},
        "prompt_tokens": 0,
        "weight_version": "0",
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)],
        "output_token_logprobs_length": new,
        "reasoning_tokens": 0,
        "completion_tokens": new,
        "cached_tokens": 0,
        "weight_versions": [{"version": "0", "start": 0, "end": new}],
        "cached_tokens_details": None,
    }
    if rows:
        meta["routed_experts"] = base64.b64encode(to_bytes(encode_routes(_experts(rows, number), ROUTING, "stand-in"))).decode()
    meta |= {"dp_rank": None, "e2e_latency": 0.06488373700267402, "response_sent_to_client_ts": 1795794287.9196184}
    return json.dumps({"output_ids": tokens, "meta_info": meta}, separators=(",", ":")).encode()


@functools.cache
def _packed(new: int, rows: int, number: int) -> bytes:
    made = packed(json.loads(rendered(new, rows, number)), base64.b64decode)
    assert made is not None
    return made


@functools.cache
def _some() -> np.ndarray:
    return drawn(_DRAWN)


def _experts(rows: int, number: int) -> np.ndarray:
    some = np.roll(_some(), number, axis=0)
    return np.ascontiguousarray(np.tile(some, (-(-rows // len(some)), 1, 1))[:rows])


async def serve(delay_s: float) -> None:
    """Serve until the process ends; the port is the first line of output."""
    random = Random(0)
    server = await asyncio.get_running_loop().create_server(lambda: _Engine(delay_s, random), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1])))
