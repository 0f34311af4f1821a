"""OpenAI's chat completions API.

Source: OpenAI's API reference, "Create chat completion", "Chat completion object" and "Chat completion chunk object".
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from asyncmoe.rollout.episodes.openai_endpoint.conversation import Message
from asyncmoe.rollout.episodes.openai_endpoint.parameters import Fields, text_of
from asyncmoe.rollout.episodes.openai_endpoint.request import MODEL, Completion, CompletionRequest, RequestRefused, assistant, event, wrong

_MAX_CHOICES = 16
_ROLES = ("system", "developer", "user", "assistant", "tool")
_FORMATS = ("json_object", "json_schema")
_TOOLS = 'must be a list of {"type": "function", "function": {"name": text, ...}}'
_ONLY: Mapping[str, tuple[object, ...]] = {"modalities": (["text"],), "functions": ([],), "function_call": ("auto", "none")}
"""Parameters with the values of them that ask for nothing."""


class ChatApi:
    """See `Api`."""

    def parse(self, fields: Fields) -> CompletionRequest:
        """See `Api`."""
        messages = [_message(message, f"messages[{i}]") for i, message in enumerate(fields.some("messages"))]
        tools = fields.anything("tools", [])
        if not isinstance(tools, list) or not all(map(_is_tool, tools)):
            raise wrong("tools", _TOOLS)
        fields.override("tools.strict", any(tool["function"].get("strict") for tool in tools))
        calls = may_call(fields) and bool(tools)
        one_call = not fields.take("parallel_tool_calls", bool, True) and calls
        most, stops, choices = fields.limit("max_tokens", "max_completion_tokens"), fields.stops("stop"), fields.take("n", int, 1)
        if not 1 <= choices <= _MAX_CHOICES or (choices > 1 and fields.given.get("stream")):
            raise wrong("n", f"must be a whole number of 1 to {_MAX_CHOICES}, and 1 in a stream")
        logprobs, usage = fields.take("logprobs", bool, False), fields.take("stream_options", dict, {}).get("include_usage") is True
        check_format(fields.anything("response_format", {"type": "text"}), "response_format", fields)
        for name, values in _ONLY.items():
            if fields.anything(name, values[0]) not in values:
                raise wrong(name, "is not supported. Leave it out")
        return fields.request(
            messages, tools, calls, most=most, usage=usage, one_call=one_call, stops=stops, choices=choices, logprobs=logprobs
        )

    def whole(self, request: CompletionRequest, answers: Sequence[Completion]) -> dict[str, Any]:
        """See `Api`."""
        choices = [
            {"index": n, "message": _told(answer), "logprobs": _logprobs(request, answer), "finish_reason": answer.finish}
            for n, answer in enumerate(answers)
        ]
        return {**_head(request, "chat.completion"), "choices": choices, "usage": _usage(answers)}

    def events(self, request: CompletionRequest, answer: Completion) -> bytes:
        """See `Api`."""
        head, told = _head(request, "chat.completion.chunk") | ({"usage": None} if request.usage else {}), _told(answer)
        calls = [{"index": i, **call} for i, call in enumerate(told.get("tool_calls", ()))]
        deltas = [{"role": "assistant", "content": answer.text}, *([{"tool_calls": calls}] if calls else [])]
        choices = [{"delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
        choices.append({"delta": {}, "logprobs": _logprobs(request, answer), "finish_reason": answer.finish})
        chunks = [{**head, "choices": [{"index": 0, **choice}]} for choice in choices]
        if request.usage:
            chunks.append({**head, "choices": [], "usage": _usage([answer])})
        return b"".join(map(event, chunks)) + b"data: [DONE]\n\n"

    def error(self, refused: RequestRefused) -> dict[str, Any]:
        """See `Api`."""
        return refused.body()


def models() -> dict[str, Any]:
    """Return the answer to a request for the list of models."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "asyncmoe"}]}


def check_format(form: object, name: str, fields: Fields) -> None:
    """Check the format of a response. Engines have no tokenizer, so they cannot keep a response to a grammar.

    Raises:
        RequestRefused: it is unknown.
    """
    kind = form.get("type") if isinstance(form, dict) else None
    if kind in _FORMATS:
        fields.override(name)
    elif kind != "text":
        raise wrong(name, f"must have a type of text, {', '.join(_FORMATS)}")


def may_call(fields: Fields) -> bool:
    """Take the choice of tools out of a request; return True if the policy may call tools.

    Raises:
        RequestRefused: the choice is unknown.
    """
    choice = fields.anything("tool_choice", "auto")
    if choice in ("auto", "none"):
        return bool(choice == "auto")
    if choice == "required" or (isinstance(choice, dict) and choice.get("type") in ("function", "allowed_tools")):
        fields.override("tool_choice")
        return True
    raise wrong("tool_choice", "must be auto, none, required or a function")


def _is_tool(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _message(message: object, where: str) -> Message:
    """Return the normal form: "role", "content" (text), and if present "name", "tool_call_id", "reasoning_content" and "tool_calls" (id,
    name, arguments)."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise wrong(where, f"must be an object with a role of {', '.join(_ROLES)}")
    given = {key: value for key, value in message.items() if value not in (None, "", [], {})}
    made = {"role": given.pop("role"), "content": text_of(given.pop("content", ""), f"{where}.content")}
    calls = given.pop("tool_calls", [])
    for key in ("name", "tool_call_id", "reasoning_content"):
        if key in given:
            made[key] = text_of(given.pop(key), f"{where}.{key}")
    if given:
        raise wrong(f"{where}.{min(given)}", "is not supported")
    if not isinstance(calls, list):
        raise wrong(f"{where}.tool_calls", "must be a list")
    if calls:
        made["tool_calls"] = assistant("", [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)])["tool_calls"]
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
