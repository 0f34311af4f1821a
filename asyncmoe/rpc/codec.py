"""Encode and decode messages. All RPC messages from a socket are parsed here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from asyncmoe.errors import ProtocolError
from asyncmoe.rpc.base import Message
from asyncmoe.rpc.messages import Reply, Request

MAX_FRAME_BYTES = 64 << 20
"""Largest frame that either side accepts; libzmq disconnects a peer that sends more. A trajectory of 2^20 tokens has 4 MiB frames."""

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Message) -> bytes:
    """Encode one message as msgpack.

    Raises:
        ProtocolError: the message is larger than the peer accepts.
    """
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolError(f"{type(message).__name__}: got {len(payload)} bytes, expected at most {MAX_FRAME_BYTES}")
    return payload


def decode_request(payload: bytes | memoryview) -> Request:
    """Decode a request. Raises ProtocolError unless `payload` is exactly one well-formed request."""
    return parsed(lambda: _requests.decode(payload), "message")


def decode_reply(payload: bytes | memoryview) -> Reply:
    """Decode a reply. Raises ProtocolError unless `payload` is exactly one well-formed reply."""
    return parsed(lambda: _replies.decode(payload), "message")


def parsed(decode: Callable[[], T], what: str) -> T:
    """Decode what another process has sent. `what`: its name in errors. Raises ProtocolError unless it is well-formed."""
    # msgspec raises ValueError for invalid UTF-8 and RecursionError for deep nesting, not its own error class.
    try:
        return decode()
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed {what}: {error}") from error
