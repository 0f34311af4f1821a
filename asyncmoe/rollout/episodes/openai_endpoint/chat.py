"""OpenAI's chat completions API.

Source: OpenAI's API reference, "Create chat completion", "Chat completion object" and "Chat completion chunk object".
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from asyncmoe.rollout.episodes.openai_endpoint.conversation import Message
from asyncmoe.rollout.episodes.openai_endpoint.parameters import Api, Fields, function, text_of
from asyncmoe.rollout.episodes.openai_endpoint.request import MODEL, Completion, CompletionRequest, assistant, event, wrong

_ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatApi(Api):
    """See `Api`."""

    def parse(self, fields: Fields) -> CompletionRequest:
        """See `Api`."""
        messages = [_message(message, f"messages[{i}]") for i, message in enumerate(fields.some("messages"))]
        tools = [_tool(fields, tool, f"tools[{i}]") for i, tool in enumerate(fields.take("tools", list, []))]
        calls, one_call = may_call(fields, tools)
        most, stops = fields.limit("max_tokens", "max_completion_tokens"), fields.stops("stop")
        if fields.take("n", int, 1) != 1:
            raise wrong("n", "must be 1; for more responses send more requests at once, each a path of its own")
        usage = fields.take("stream_options", dict, {}).get("include_usage") is True
        fields.override("response_format", asks_for_format(fields.anything("response_format")))
        return fields.request(messages, tools, calls, most=most, usage=usage, one_call=one_call, stops=stops)

    def whole(self, request: CompletionRequest, answer: Completion) -> dict[str, Any]:
        """See `Api`."""
        choice = {"index": 0, "message": _told(answer), "logprobs": None, "finish_reason": answer.finish}
        return {**_head(request, "chat.completion"), "choices": [choice], "usage": _usage(answer)}

    def events(self, request: CompletionRequest, answer: Completion) -> bytes:
        """See `Api`."""
        head, told = _head(request, "chat.completion.chunk") | ({"usage": None} if request.usage else {}), _told(answer)
        calls = [{"index": i, **call} for i, call in enumerate(told.get("tool_calls", ()))]
        deltas = [{"role": "assistant", "content": answer.text}, *([{"tool_calls": calls}] if calls else [])]
        choices = [{"delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
        choices.append({"delta": {}, "logprobs": None, "finish_reason": answer.finish})
        chunks = [{**head, "choices": [{"index": 0, **choice}]} for choice in choices]
        if request.usage:
            chunks.append({**head, "choices": [], "usage": _usage(answer)})
        return b"".join(map(event, chunks)) + b"data: [DONE]\n\n"


def models() -> dict[str, Any]:
    """Return the answer to a request for the list of models."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "asyncmoe"}]}


def may_call(fields: Fields, tools: Sequence[Message]) -> tuple[bool, bool]:
    """Take the tool choice out of a request; return whether the policy may call tools, and whether only one. A call cannot be forced."""
    choice = fields.anything("tool_choice", "auto")
    fields.override("tool_choice", choice not in ("auto", "none"))
    calls = choice != "none" and bool(tools)
    return calls, not fields.take("parallel_tool_calls", bool, True) and calls


def asks_for_format(form: object) -> bool:
    """Return whether a client asks for a format other than text. Engines have no tokenizer, so no grammar can enforce one."""
    return form not in (None, {"type": "text"})


def _tool(fields: Fields, tool: object, where: str) -> Message:
    inner = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(inner, dict):
        raise wrong(where, 'must be {"type": "function", "function": {"name": text, ...}}')
    rest = {key: value for key, value in tool.items() if key != "function"}
    return function(fields, rest | inner, where, "function", "parameters")


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
    """Return the answer as a message of the API."""
    calls = [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}} for call in answer.calls
    ]
    content = answer.text or (None if calls else "")
    return {"role": "assistant", "content": content, "refusal": None, **({"tool_calls": calls} if calls else {})}


def _head(request: CompletionRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": request.model}


def _usage(answer: Completion) -> dict[str, int]:
    counts = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.sampled_tokens}
    return {**counts, "total_tokens": answer.prompt_tokens + answer.sampled_tokens}
