"""Requests and answers of OpenAI's chat completions API, as far as they make sense if every sampled token is trained on.

The run determines how tokens are sampled: a request for different sampling is refused by the parameter's name, never answered differently.
Source: OpenAI's API reference, "Create chat completion", "Chat completion object" and "Chat completion chunk object".
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asyncmoe.rollout.engines.types import Sampling
from asyncmoe.rollout.episodes.openai_endpoint.conversation import Message, PolicyRequest
from asyncmoe.rollout.episodes.tools.calls import Call, find

MODEL = "policy"
_ROLES = ("system", "developer", "user", "assistant", "tool")
_NO_MATTER = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier", "stream_options"})
"""Parameters that do not affect sampling."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logprobs": (False,),
    "logit_bias": ({},),
    "stop": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
}
"""Parameters that are accepted only with a neutral value."""


class RequestRefused(Exception):
    """A request that is answered with an error in OpenAI's form."""

    def __init__(self, status: int, message: str, *, code: str | None = None, parameter: str | None = None) -> None:
        self.status, self.code, self.parameter = status, code, parameter
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.parameter, "code": self.code}}


@dataclass(frozen=True)
class CompletionRequest:
    """A request for a completion.

    Attributes:
        model: the client's name for the model; every name means the policy.
        most: maximum tokens of the response; None: the run's maximum.
        calls: True if the response is searched for tool calls.
        usage: True if a stream ends with token counts.
    """

    model: str
    asked: PolicyRequest
    most: int | None
    stream: bool
    usage: bool
    calls: bool


@dataclass(frozen=True)
class Completion:
    """The policy's response, as the client receives it.

    Attributes:
        message: in the normal form of requests, for comparison when a later request contains it.
        finish: "stop", "length" or "tool_calls".
        prompt_tokens, sampled_tokens: counts.
    """

    message: Message
    finish: str
    prompt_tokens: int
    sampled_tokens: int


def parse(body: bytes, sampling: Sampling) -> CompletionRequest:
    """Parse a request, and check that the run's sampling can answer it.

    Raises:
        RequestRefused: 400, naming the parameter.
    """
    try:
        fields = json.loads(body)
        # A lone surrogate is valid JSON but not encodable text; nesting too deep to serialize here is also too deep for templates.
        json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, f"the body is not valid JSON: {str(error)[:200]}") from error
    if not isinstance(fields, dict):
        raise RequestRefused(400, "the body must be a JSON object")
    fields = {key: value for key, value in fields.items() if value is not None}
    model, messages, tools = fields.pop("model", MODEL), fields.pop("messages", None), fields.pop("tools", [])
    stream, limits = fields.pop("stream", False), [fields.pop(name, None) for name in ("max_tokens", "max_completion_tokens")]
    _check_neutral(fields, sampling)
    if not isinstance(model, str) or len(model) > 200:
        raise _wrong("model", "must be a short text")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "must be a list of at least one message")
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise _wrong("tools", 'must be a list of {"type": "function", "function": {"name": text, ...}}')
    if not isinstance(stream, bool):
        raise _wrong("stream", "must be true or false")
    known = tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))
    calls = bool(tools) and fields.get("tool_choice") != "none"
    options = fields.get("stream_options", {})
    usage = isinstance(options, dict) and options.get("include_usage") is True
    asked = PolicyRequest(known, tuple(map(_for_template, known)), tuple(tools) if calls else ())
    return CompletionRequest(model, asked, _most(limits), stream, usage, calls)


def message_of(text: str, calls: bool) -> Message:
    """Return the policy's text as a message in the normal form of requests; with `calls`, "hermes" tool calls are taken out of the text."""
    found = [call for call in find(text, "hermes") if isinstance(call, Call) and call.name is not None] if calls else []
    if not found:
        return {"role": "assistant", "content": text}
    starts, ends = [call.start for call in found], [call.end for call in found]
    rest = "".join(text[a:b] for a, b in zip([0, *ends], [*starts, len(text)], strict=True)).strip()
    made = [{"id": f"call_{secrets.token_hex(12)}", "name": call.name, "arguments": call.arguments} for call in found]
    return {"role": "assistant", "content": rest, "tool_calls": made}


def completion(request: CompletionRequest, answer: Completion) -> dict[str, Any]:
    """Return the answer to a request without `stream`."""
    choice = {"index": 0, "message": _told(answer.message), "logprobs": None, "finish_reason": answer.finish}
    return {**_head(request, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def chunks(request: CompletionRequest, answer: Completion) -> Iterator[bytes]:
    """Yield the answer to a request with `stream`: server-sent events."""
    head = _head(request, "chat.completion.chunk")
    told = _told(answer.message)
    delta = {key: value for key, value in told.items() if value is not None}
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    for part, finish in ((delta, None), ({}, answer.finish)):
        yield _event({**head, "choices": [{"index": 0, "delta": part, "logprobs": None, "finish_reason": finish}]})
    if request.usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def models() -> dict[str, Any]:
    """Return the answer to a request for the list of models."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "asyncmoe"}]}


def _check_neutral(fields: Mapping[str, Any], sampling: Sampling) -> None:
    drawn = {
        "temperature": (sampling.temperature,),
        "top_p": (sampling.top_p,),
        "top_k": (-1, 0) if sampling.top_k is None else (sampling.top_k,),
        "min_p": (sampling.min_p,),
    }
    for name, value in fields.items():
        if name in drawn and (isinstance(value, bool) or value not in drawn[name]):
            raise _wrong(name, f"is the run's {drawn[name][0]:g} and cannot be {value!r}: what is sampled is trained on. Leave it out")
        if name in _NEUTRAL and not any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in _NEUTRAL[name]
        ):
            raise _wrong(name, f"cannot be {str(value)[:80]!r} where what is sampled is trained on. Leave it out")
        if name not in drawn and name not in _NEUTRAL and name not in _NO_MATTER:
            raise _wrong(name, "is not supported. Leave it out")


def _most(limits: list[object]) -> int | None:
    given = [limit for limit in limits if limit is not None]
    for limit in given:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise _wrong("max_completion_tokens", "must be a positive whole number")
    return min((limit for limit in given if isinstance(limit, int)), default=None)


def _is_tool(tool: object) -> bool:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return False
    function = tool.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _message(message: object, where: str) -> Message:
    """Return the normal form: "role", "content" (text), and if present "name", "tool_call_id" and "tool_calls" (id, name, arguments)."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise _wrong(where, f"must be an object with a role of {', '.join(_ROLES)}")
    given = {key: value for key, value in message.items() if value not in (None, [], {})}
    if unknown := set(given) - {"role", "content", "name", "tool_call_id", "tool_calls"}:
        raise _wrong(f"{where}.{min(unknown)}", "is not supported")
    made = {"role": given["role"], "content": _content(given.get("content", ""), f"{where}.content")}
    for key in ("name", "tool_call_id"):
        if key in given:
            made[key] = _content(given[key], f"{where}.{key}")
    if "tool_calls" in given:
        if not isinstance(given["tool_calls"], list):
            raise _wrong(f"{where}.tool_calls", "must be a list")
        made["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(given["tool_calls"])]
    return made


def _content(content: object, where: str) -> str:
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
            raise _wrong(where, "must be text; other parts are not supported")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise _wrong(where, "must be text")
    return content


def _tool_call(call: object, where: str) -> dict[str, str]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise _wrong(where, 'must be {"id": text, "type": "function", "function": {"name": text, "arguments": text}}')
    parts = {"id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments")}
    return {key: _content(value, f"{where}.{key}") for key, value in parts.items()}


def _for_template(message: Message) -> Message:
    """Return a message in the form chat templates accept: call arguments are objects."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        try:
            arguments = json.loads(call["arguments"])
        except (ValueError, RecursionError):
            arguments = call["arguments"]
        calls.append({"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _told(message: Message) -> dict[str, Any]:
    """Return a message in the form the API returns it."""
    if "tool_calls" not in message:
        return {"role": "assistant", "content": message["content"]}
    calls = [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in message["tool_calls"]
    ]
    return {"role": "assistant", "content": message["content"] or None, "tool_calls": calls}


def _head(request: CompletionRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": request.model}


def _usage(answer: Completion) -> dict[str, int]:
    total = answer.prompt_tokens + answer.sampled_tokens
    return {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.sampled_tokens, "total_tokens": total}


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _wrong(parameter: str, message: str) -> RequestRefused:
    return RequestRefused(400, f"{parameter} {message}", parameter=parameter, code="unsupported_or_invalid")
