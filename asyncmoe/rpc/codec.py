"""Messages to bytes and back. The only place that parses what came from a socket."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from asyncmoe.errors import ProtocolError
from asyncmoe.rpc.messages import Message, Reply, Request

MAX_FRAME_BYTES = 64 << 20
"""Largest frame either side takes; libzmq drops the connection of a peer that sends more. A trajectory of 2^20 tokens has 4 MiB frames."""

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Message, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """msgpack of one message.

    Raises:
        ProtocolError: larger than the peer would take.
    """
    payload = _encoder.encode(message)
    if len(payload) > max_bytes:
        raise ProtocolError(f"{type(message).__name__}: got {len(payload)} bytes, expected at most {max_bytes}")
    return payload


def decode_request(payload: bytes | memoryview) -> Request:
    """Raises ProtocolError for anything that is not exactly one well-formed request."""
    return _decode(payload, _requests)


def decode_reply(payload: bytes | memoryview) -> Reply:
    """Raises ProtocolError for anything that is not exactly one well-formed reply."""
    return _decode(payload, _replies)


def _decode(payload: bytes | memoryview, decoder: msgspec.msgpack.Decoder[M]) -> M:
    # msgspec lets invalid UTF-8 (ValueError) and deep nesting (RecursionError) escape its own error class.
    try:
        return decoder.decode(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from error
