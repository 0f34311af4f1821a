"""HTTP client of one SGLang 0.5.23 server; implements `asyncmoe.engines.engine.Engine`, which documents the calls."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from asyncmoe.engines.sglang.answer import GenerateAnswer, packed_answer, response
from asyncmoe.engines.sglang.generation import Scored, request_body, scored, scoring_body
from asyncmoe.engines.sglang.streaming import Parts, StreamPart, answer, events
from asyncmoe.engines.sglang.weights import WeightEndpoints
from asyncmoe.engines.types import Generation, Listener, ParsedCall, Sampling, Tokens
from asyncmoe.errors import EngineError
from asyncmoe.platform.sglang.packed_answers import MEDIA_TYPE


class _Parsed(msgspec.Struct):
    """The part of an answer of `/parse_function_call` used here (srt/entrypoints/http_server.py `parse_function_call_request`; its calls:
    srt/function_call/core_types.py `ToolCallItem`)."""

    calls: tuple[ParsedCall, ...]
    normal_text: str = ""


class SGLangClient(WeightEndpoints):
    """Client of one engine's endpoints; see `SGLangConnection` for its arguments."""

    async def ready(self) -> bool:
        """Return whether the server has started and is healthy; True also while it is paused, when `/ready` refuses."""
        return await self._ok("/ping", 5.0)

    async def alive(self, timeout_s: float) -> bool:
        """SGLang waits in steps of a second; a busy scheduler answers after its next batch instead of running the probe."""
        return await self._ok("/health_generate", timeout_s)

    async def freeze(self) -> None:
        """Keep later garbage collections in the server's processes from scanning what is loaded by now; see `asyncmoe.process.freeze`.

        Raises:
            EngineError: the server refused it.
        """
        await self._send("/freeze_gc", {})

    async def generate(
        self,
        tokens: Tokens,
        sampling: Sampling,
        salt: str,
        timeout_s: float,
        routed: int = 0,
        adapter: str | None = None,
        listener: Listener | None = None,
        dp_rank: int | None = None,
    ) -> Generation:
        body = {**request_body(tokens, sampling, salt, routed, adapter), "routed_dp_rank": dp_rank}
        if listener is not None:
            return response(self.name, await self._heard(body, listener, timeout_s), sampling.recording)
        async with self._requested("/generate", body, timeout_s, f"{MEDIA_TYPE}, application/json") as reply:
            kind, said = reply.content_type, await reply.read()
        try:
            whole = packed_answer(said) if kind == MEDIA_TYPE else answer(self.name, said)
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self.name}: /generate: unexpected answer: {error}") from error
        return response(self.name, whole, sampling.recording)

    async def _heard(self, body: dict[str, Any], listener: Listener, timeout_s: float) -> GenerateAnswer:
        """Generate a response in parts and pass them to the listener; if it ends the response, abort the request.

        The listener finds stop texts: SGLang could do so only with a tokenizer in the engine, and only in as many of the last tokens as the
        stop text has.
        """
        rid = uuid.uuid4().hex
        sampled = {**body["sampling_params"], "stream_interval": listener.every}
        parts, buffer, ended = Parts(self.name), bytearray(), False
        async with aclosing(self._stream("/generate", {**body, "rid": rid, "stream": True, "sampling_params": sampled}, timeout_s)) as data:
            async for piece in data:
                buffer += piece
                for event in events(buffer):
                    if event == b"[DONE]":
                        continue
                    try:
                        tokens = parts.add(msgspec.json.decode(event, type=StreamPart))
                    except (ValueError, RecursionError) as error:
                        raise EngineError(f"{self.name}: /generate: unexpected part of an answer: {error}") from error
                    if not ended and tokens and listener.hear(tokens):
                        ended = True
                        await self._send("/abort_request", {"rid": rid, "abort_all": False})
        return parts.whole()

    async def prompt_logprobs(self, tokens: Sequence[int], timeout_s: float) -> tuple[float, ...]:
        body = scoring_body(tokens, f"probe-{uuid.uuid4().hex}")
        return scored(self.name, tokens, await self._post("/generate", body, Scored, timeout_s))

    async def parse_calls(self, text: str, parser: str, tools: Sequence[Mapping[str, Any]]) -> tuple[ParsedCall, ...]:
        body = {"text": text, "tool_call_parser": parser, "tools": [dict(tool) for tool in tools]}
        found = await self._post("/parse_function_call", body, _Parsed)
        return tuple(msgspec.structs.replace(call, rest=found.normal_text) for call in found.calls)

    async def abort(self) -> None:
        await self._send("/abort_request", {"rid": "", "abort_all": True})

    async def load_adapter(self, name: str, folder: Path, timeout_s: float) -> None:
        """Load an adapter for requests that name it. Once used, it keeps its slot in adapter memory, whatever else is requested."""
        body = {"lora_name": name, "lora_path": str(folder), "pinned": True}
        await self._send("/load_lora_adapter", body, timeout_s)
