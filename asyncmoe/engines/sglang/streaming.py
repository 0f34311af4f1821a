"""A response of `/generate` in JSON: whole, or in parts, as SGLang 0.5.23 streams it with --incremental-streaming-output: every part holds
only what is new.

One part is an exception: a request aborted while it waits in the queue ends with a part that repeats all log-probabilities
(`tokenizer_manager.py`, `_handle_abort_req`). `output_token_logprobs_length`, a count of all of them in every part, reveals that part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from asyncmoe.engines.sglang.answer import Entry, Finish, GenerateAnswer, floats
from asyncmoe.engines.types import IdLists, VersionSpan
from asyncmoe.errors import EngineError
from asyncmoe.platform.sglang.packed_answers import lists, pairs
from asyncmoe.trajectory import Buffer


class _PartMeta(msgspec.Struct, frozen=True):
    finish_reason: Finish | None = None
    output_token_logprobs: list[Entry] = []
    output_token_logprobs_length: int = 0
    weight_versions: list[VersionSpan] = []
    cached_tokens: int = 0
    routed_experts: bytes | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[float] | None = None
    output_top_logprobs: list[list[Entry]] | None = None


class StreamPart(msgspec.Struct, frozen=True):
    """One server-sent event, or a whole answer."""

    output_ids: list[int] = []
    meta_info: _PartMeta = _PartMeta()
    error: Mapping[str, Any] | None = None


class Parts:
    """Joins the parts of one response.

    Args:
        name: name of the engine in errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._entries: list[Entry] = []
        self._masks: list[list[int]] | None = None
        self._mask_logprobs: list[float] = []
        self._top: list[list[Entry]] | None = None
        self._last: _PartMeta | None = None

    def add(self, part: StreamPart) -> Sequence[int]:
        """Add the next part and return its new tokens.

        Raises:
            EngineError: the engine refused the request, or the part does not continue the earlier ones.
        """
        if part.error is not None:
            raise EngineError(f"{self._name}: /generate: {str(part.error.get('message', part.error))[:500]}")
        meta, before = part.meta_info, len(self._entries)
        repeats = before > 0 and meta.output_token_logprobs_length == len(meta.output_token_logprobs)
        entries = meta.output_token_logprobs[before:] if repeats else meta.output_token_logprobs
        if before + len(entries) != meta.output_token_logprobs_length or self._last is not None:
            got = f"{before} tokens and {len(entries)} more, expected {meta.output_token_logprobs_length} in all"
            raise EngineError(f"{self._name}: parts of a response do not fit together: got {got}")
        if not repeats and [entry[1] for entry in entries] != part.output_ids:
            raise EngineError(f"{self._name}: log-probabilities do not match the {len(part.output_ids)} tokens of a part")
        self._entries += entries
        if meta.output_token_sampling_mask is not None:
            self._masks = self._masks or []
            self._masks += meta.output_token_sampling_mask
        self._mask_logprobs += meta.output_token_sampling_logprobs or ()
        if meta.output_top_logprobs is not None:
            self._top = (self._top or []) + meta.output_top_logprobs[before if repeats else 0 :]
        if meta.finish_reason is not None:
            self._last = meta
        return [entry[1] for entry in entries]

    def whole(self) -> GenerateAnswer:
        """Return the answer that `/generate` would have given without parts.

        Raises:
            EngineError: the last part has not arrived, or a number has more than 32 bits.
        """
        last = self._last
        if last is None or last.finish_reason is None:
            raise EngineError(f"{self._name}: /generate: the answer ended after {len(self._entries)} tokens without its last part")
        try:
            tokens = np.array([token for _, token, _ in self._entries], np.int32)
            masks = None if self._masks is None else IdLists(*lists(self._masks))
            top = None if self._top is None else pairs(self._top)
        except (ValueError, OverflowError) as error:
            raise EngineError(f"{self._name}: /generate: unexpected answer: {error}") from error
        logprobs, values = floats([value for value, _, _ in self._entries]), floats(self._mask_logprobs)
        rest = last.weight_versions, last.finish_reason, last.cached_tokens, last.routed_experts
        return GenerateAnswer(tokens, logprobs, *rest, masks, values, top)


def answer(name: str, body: Buffer) -> GenerateAnswer:
    """Read a whole answer.

    Raises:
        ValueError, RecursionError: it is not JSON, or not of this form.
        EngineError: as `Parts`.
    """
    parts = Parts(name)
    parts.add(msgspec.json.decode(body, type=StreamPart))
    return parts.whole()


def events(buffer: bytearray) -> list[bytes]:
    """Remove the complete server-sent events from a buffer and return each one's data; every event of SGLang is one line of data."""
    found = []
    while (end := buffer.find(b"\n\n")) >= 0:
        line = bytes(buffer[:end]).strip()
        del buffer[: end + 2]
        if line.startswith(b"data:"):
            found.append(line[5:].strip())
    return found
