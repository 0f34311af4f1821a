"""OpenAI's chat completions API.

Source: OpenAI's API reference, "Create chat completion", "Chat completion object" and "Chat completion chunk object".
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from asyncmoe.engines.types import Sampling
from asyncmoe.rollout.episodes.openai_endpoint.conversation import Message
from asyncmoe.rollout.episodes.openai_endpoint.parameters import (
    MAX_CHOICES,
    Conflicts,
    body_fields,
    check_sampling,
    limit,
    refuse_rest,
    stop_texts,
    taken,
    text_of,
)
from asyncmoe.rollout.episodes.openai_endpoint.request import (
    MODEL,
    Completion,
    CompletionRequest,
    OnConflict,
    RequestRefused,
    assistant,
    policy_request,
    wrong,
)

_ROLES = ("system", "developer", "user", "assistant", "tool")
_FORMATS = ("json_object", "json_schema")


class ChatApi:
    """The API: `parse` a request, and answer it `whole` or as a `stream`."""

    def parse(self, body: bytes, sampling: Sampling, on_conflict: OnConflict) -> CompletionRequest:
        """Parse a request.

        Raises:
            RequestRefused: 400, naming the parameter.
        """
        given = body_fields(body)
        fields, conflicts = dict(given), Conflicts(on_conflict)
        model, stream = model_of(fields), taken(fields, "stream", bool, "true or false", False)
        messages = _messages(fields.pop("messages", None))
        tools, calls = _tools(fields, conflicts)
        one_call = not taken(fields, "parallel_tool_calls", bool, "true or false", True)
        most, stops = limit(fields, "max_tokens", "max_completion_tokens"), stop_texts(fields.pop("stop", []), "stop")
        choices = taken(fields, "n", int, f"a whole number of 1 to {MAX_CHOICES}", 1)
        if not 1 <= choices <= MAX_CHOICES or (choices > 1 and stream):
            raise wrong("n", f"must be a whole number of 1 to {MAX_CHOICES}, and 1 in a stream")
        logprobs = taken(fields, "logprobs", bool, "true or false", False)
        if taken(fields, "top_logprobs", int, "a whole number", 0):
            conflicts.note("top_logprobs", "is not recorded for other tokens than the sampled one")
        check_format(fields.pop("response_format", {"type": "text"}), "response_format", conflicts)
        _check_other(fields)
        options, variables = (taken(fields, name, dict, "an object", {}) for name in ("stream_options", "chat_template_kwargs"))
        check_sampling(fields, sampling, conflicts)
        refuse_rest(fields)
        return CompletionRequest(
            model,
            policy_request(messages, tools if calls else (), variables),
            most,
            stream,
            usage=options.get("include_usage") is True,
            calls=calls,
            one_call=calls and one_call,
            stops=stops,
            choices=choices,
            logprobs=logprobs,
            overridden=tuple(conflicts.names),
            fields=given,
        )

    def whole(self, request: CompletionRequest, answers: Sequence[Completion]) -> dict[str, Any]:
        """Return the answer to a request without `stream`."""
        choices = [
            {"index": n, "message": _told(answer), "logprobs": _logprobs(request, answer), "finish_reason": answer.finish}
            for n, answer in enumerate(answers)
        ]
        return {**_head(request, "chat.completion"), "choices": choices, "usage": _usage(answers)}

    def stream(self, request: CompletionRequest) -> ChatStream:
        """Return the writer of an answer to a request with `stream`."""
        return ChatStream(request)

    def error(self, refused: RequestRefused) -> dict[str, Any]:
        """Return the body of an error."""
        return refused.body()


class ChatStream:
    """Writes one answer as server-sent events."""

    def __init__(self, request: CompletionRequest) -> None:
        self._request, self._head = request, _head(request, "chat.completion.chunk") | ({"usage": None} if request.usage else {})

    def begin(self) -> bytes:
        """Return the events before the first text."""
        return self._chunk({"role": "assistant", "content": ""})

    def text(self, piece: str) -> bytes:
        """Return the events of a piece of text."""
        return self._chunk({"content": piece})

    def end(self, answer: Completion) -> bytes:
        """Return the events after the last text."""
        calls = [{"index": i, **call} for i, call in enumerate(_told(answer).get("tool_calls", ()))]
        made = self._chunk({"tool_calls": calls}) if calls else b""
        made += self._chunk({}, answer.finish, _logprobs(self._request, answer))
        if self._request.usage:
            made += event({**self._head, "choices": [], "usage": _usage([answer])})
        return made + b"data: [DONE]\n\n"

    def failed(self, refused: RequestRefused) -> bytes:
        """Return the events of an answer that cannot be completed."""
        return event(refused.body())

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None, logprobs: object = None) -> bytes:
        return event({**self._head, "choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]})


def models() -> dict[str, Any]:
    """Return the answer to a request for the list of models."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "asyncmoe"}]}


def model_of(fields: dict[str, Any]) -> str:
    """Take the client's name for the model out of a request.

    Raises:
        RequestRefused: it is not a short text.
    """
    model = taken(fields, "model", str, "a short text", MODEL)
    if len(model) > 200:
        raise wrong("model", "must be a short text")
    return str(model)


def check_format(form: object, name: str, conflicts: Conflicts) -> None:
    """Check the format of a response. Engines have no tokenizer, so they cannot keep a response to a grammar.

    Raises:
        RequestRefused: it is unknown, or a conflict that is refused.
    """
    kind = form.get("type") if isinstance(form, dict) else None
    if kind in _FORMATS:
        conflicts.note(name, f"cannot force {kind}")
    elif kind != "text":
        raise wrong(name, f"must have a type of text, {', '.join(_FORMATS)}")


def check_choice(choice: object, conflicts: Conflicts) -> bool:
    """Return True if the policy may call tools.

    Raises:
        RequestRefused: the choice is unknown, or a conflict that is refused.
    """
    if choice in ("auto", "none"):
        return choice == "auto"
    if choice == "required" or (isinstance(choice, dict) and choice.get("type") in ("function", "allowed_tools")):
        conflicts.note("tool_choice", "cannot force a call")
        return True
    raise wrong("tool_choice", "must be auto, none, required or a function")


def event(content: Mapping[str, Any], kind: str | None = None) -> bytes:
    """Return a server-sent event."""
    named = b"" if kind is None else b"event: " + kind.encode() + b"\n"
    return named + b"data: " + json.dumps(content).encode() + b"\n\n"


def _tools(fields: dict[str, Any], conflicts: Conflicts) -> tuple[list[Message], bool]:
    """Take the tools out of a request; return them, and whether the policy may call them."""
    tools = fields.pop("tools", [])
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise wrong("tools", 'must be a list of {"type": "function", "function": {"name": text, ...}}')
    if any(tool["function"].get("strict") for tool in tools):
        conflicts.note("tools.strict", "cannot force arguments to a schema")
    calls = check_choice(fields.pop("tool_choice", "auto"), conflicts)
    return tools, bool(tools) and calls


def _is_tool(tool: object) -> bool:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return False
    function = tool.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _check_other(fields: dict[str, Any]) -> None:
    """Take parameters out of a request that have a single supported value."""
    only: Mapping[str, tuple[object, ...]] = {"modalities": (["text"],), "functions": ([],), "function_call": ("auto", "none")}
    for name, values in only.items():
        if name in fields and fields.pop(name) not in values:
            raise wrong(name, "is not supported. Leave it out")


def _messages(messages: object) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "must be a list of at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: object, where: str) -> Message:
    """Return the normal form: "role", "content" (text), and if present "name", "tool_call_id", "reasoning_content" and "tool_calls" (id,
    name, arguments)."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise wrong(where, f"must be an object with a role of {', '.join(_ROLES)}")
    given = {key: value for key, value in message.items() if value not in (None, "", [], {})}
    if unknown := set(given) - {"role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content"}:
        raise wrong(f"{where}.{min(unknown)}", "is not supported")
    made = {"role": given["role"], "content": text_of(given.get("content", ""), f"{where}.content")}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if key in given:
            made[key] = text_of(given[key], f"{where}.{key}")
    if "tool_calls" in given:
        if not isinstance(given["tool_calls"], list):
            raise wrong(f"{where}.tool_calls", "must be a list")
        calls = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(given["tool_calls"])]
        return {**made, "tool_calls": assistant("", calls)["tool_calls"]}
    return made


def _tool_call(call: object, where: str) -> dict[str, str]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise wrong(where, 'must be {"id": text, "type": "function", "function": {"name": text, "arguments": text}}')
    parts = {"id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments")}
    return {key: text_of(value, f"{where}.{key}") for key, value in parts.items()}


def _told(answer: Completion) -> dict[str, Any]:
    """Return a message in the form the API returns it."""
    calls = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in answer.calls]
    content = answer.text or (None if calls else "")
    return {"role": "assistant", "content": content, "refusal": None, **({"tool_calls": calls} if calls else {})}


def _logprobs(request: CompletionRequest, answer: Completion) -> dict[str, Any] | None:
    return {"content": token_logprobs(answer), "refusal": None} if request.logprobs else None


def token_logprobs(answer: Completion) -> list[dict[str, Any]]:
    """Return the log-probabilities of a response's tokens; a token without text of its own is the empty text, and one that is a part of a
    character has no bytes."""
    bytes_of = {text: [] if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode()) for text, _ in answer.logprobs}
    return [{"token": text, "logprob": value, "bytes": bytes_of[text], "top_logprobs": []} for text, value in answer.logprobs]


def _head(request: CompletionRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": request.model}


def _usage(answers: Sequence[Completion]) -> dict[str, int]:
    prompt, sampled = answers[0].prompt_tokens, sum(answer.sampled_tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
