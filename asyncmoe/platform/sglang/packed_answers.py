"""Binary responses of `/generate`, for a client that accepts `MEDIA_TYPE`.

SGLang 0.5.23 responds in JSON: 35 bytes and more for a token's id and log-probability, and routes in base64. Here a token takes 8 bytes and
routes take their raw bytes, and a reader uses the arrays in place instead of parsing text. The reader accepts both forms, so an engine
sends SGLang's form for a response with inconsistent parts, which the reader then rejects with the reason.

Bytes, little-endian: "ama1"; uint32, the size of the head; the head, JSON (`AnswerHead`) and spaces up to a multiple of 8 bytes; the parts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from importlib import import_module
from itertools import chain
from operator import itemgetter
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

MEDIA_TYPE = "application/vnd.asyncmoe.answer"
MAGIC = b"ama1"
BEGIN = struct.Struct("<4sI")
PAIR = "<f4,<i4"
"""A log-probability and its id."""
PARTS = (
    ("output_ids", "<i4"),
    ("output_token_logprobs", "<f4"),
    ("output_token_sampling_mask", "<i4"),
    ("ids of output_token_sampling_mask", "<i4"),
    ("output_token_sampling_logprobs", "<f4"),
    ("output_top_logprobs", PAIR),
    ("routed_experts", "u1"),
)
"""Name and type of each part, in order: tokens, their log-probabilities, the number of ids in each token's mask, all these ids, the
log-probabilities over them, the most probable ids of all tokens, and the routes (base64 in `meta_info.routed_experts`)."""
_WANTED = ContextVar("asyncmoe_packed_answer", default=False)


class AnswerHead(msgspec.Struct, frozen=True):
    """The fields of a response that are not arrays.

    Attributes:
        counts: number of elements of each of `PARTS`; None: the response lacks it.
        finish_reason, weight_versions, cached_tokens: as in `meta_info`.
    """

    counts: tuple[int | None, ...]
    finish_reason: msgspec.Raw
    weight_versions: msgspec.Raw
    cached_tokens: int


def packed(answer: Any, b64decode: Callable[..., bytes]) -> bytes | None:
    """Return a response as bytes; None if it is not a single response, or its tokens and log-probabilities do not match.

    Args:
        answer: the object that SGLang would send as JSON.
        b64decode: `base64.b64decode`, or a faster one.
    """
    try:
        meta: Mapping[str, Any] = answer["meta_info"]
        entries = meta["output_token_logprobs"]
        tokens = np.fromiter(answer["output_ids"], "<i4", len(answer["output_ids"]))
        if not np.array_equal(tokens, np.fromiter(map(itemgetter(1), entries), "<i4", len(entries))):
            return None
        logprobs = np.fromiter(map(itemgetter(0), entries), "<f4", len(entries))
        sent = meta.get("routed_experts")
        routes = None if sent is None else b64decode(sent, validate=True)
        top = None if (rows := meta.get("output_top_logprobs")) is None else pairs(rows)
        parts: list[np.ndarray | bytes | None] = [tokens, logprobs, *_masks(meta), top, routes]
        counts = tuple(None if part is None else len(part) for part in parts)
        finish, versions = (msgspec.Raw(msgspec.json.encode(meta[name])) for name in ("finish_reason", "weight_versions"))
        head = msgspec.json.encode(AnswerHead(counts, finish, versions, meta.get("cached_tokens", 0)))
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        return None
    head += b" " * (-len(head) % 8)
    arrays = [part.data if isinstance(part, np.ndarray) else part for part in parts if part is not None]
    return b"".join((BEGIN.pack(MAGIC, len(head)), head, *arrays))


def pairs(rows: Sequence[Sequence[tuple[float | None, int, Any]]]) -> np.ndarray:
    """Return the entries of all rows of `output_top_logprobs` as an array of `PAIR`, NaN for null."""
    return np.fromiter(map(itemgetter(0, 1), chain.from_iterable(rows)), PAIR)


def lists(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sizes of all rows and their numbers, int32 each. Raises OverflowError for a number of more than 32 bits."""
    counts = np.fromiter(map(len, rows), "<i4", len(rows))
    return counts, np.fromiter(chain.from_iterable(rows), "<i4", int(counts.sum()))


def _masks(meta: Mapping[str, Any]) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Return the sizes, ids and log-probabilities of sampling masks."""
    masks, values = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    logprobs = None if values is None else np.fromiter(values, "<f4", len(values))
    return (None, None, logprobs) if masks is None else (*lists(masks), logprobs)


def _mend(module: ModuleType) -> None:
    """Make the HTTP process pack the responses of requests that accept it."""
    owner: Any = module
    b64decode = import_module("pybase64").b64decode  # a package that SGLang needs, many times faster than Python's
    serve, respond = owner.serve_generate_request, owner.orjson_response

    @wraps(serve)
    async def serve_generate_request(obj: Any, request: Any, *args: Any, **named: Any) -> Any:
        before = _WANTED.set(MEDIA_TYPE in request.headers.get("accept", ""))
        try:
            return await serve(obj, request, *args, **named)
        finally:
            _WANTED.reset(before)

    @wraps(respond)
    def orjson_response(content: Any, *args: Any, **named: Any) -> Any:
        body = packed(content, b64decode) if _WANTED.get() else None
        return respond(content, *args, **named) if body is None else owner.Response(body, media_type=MEDIA_TYPE)

    owner.serve_generate_request, owner.orjson_response = serve_generate_request, orjson_response


PATCHES = {"sglang.srt.entrypoints.http_server": _mend}
