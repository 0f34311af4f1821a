"""Anthropic's Messages API.

Source: Anthropic's API reference, "Create a Message", "Count tokens in a Message" and "Streaming Messages".
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from asyncmoe.rollout.episodes.openai_endpoint.conversation import Message
from asyncmoe.rollout.episodes.openai_endpoint.parameters import Api, Fields, function, text_of
from asyncmoe.rollout.episodes.openai_endpoint.request import Completion, CompletionRequest, RequestRefused, assistant, event, wrong

_ROLES = ("user", "assistant", "system")
_NO_MATTER = ("cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id")
"""Parameters that do not affect a response, in addition to those that all APIs share."""
_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class MessagesApi(Api):
    """See `Api`."""

    def parse(self, fields: Fields) -> CompletionRequest:
        """See `Api`."""
        system = text_of(fields.anything("system", ""), "system")
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        messages += _messages(fields.some("messages"))
        tools = [
            function(fields, tool, f"tools[{i}]", "custom", "input_schema", ("cache_control", "eager_input_streaming"))
            for i, tool in enumerate(fields.take("tools", list, []))
        ]
        choice = fields.take("tool_choice", dict, {"type": "auto"})
        fields.override("tool_choice", choice.get("type") not in ("auto", "none"))
        calls = choice.get("type") != "none" and bool(tools)
        stops, most = fields.stops("stop_sequences"), fields.limit("max_tokens")
        for name in ("thinking", "output_config", "context_management"):
            fields.override(name, fields.take(name, dict, {}) not in ({}, {"type": "disabled"}))
        for name in _NO_MATTER:
            fields.anything(name)
        one_call = calls and choice.get("disable_parallel_tool_use") is True
        return fields.request(messages, tools, calls, most=most, one_call=one_call, stops=stops)

    def whole(self, request: CompletionRequest, answer: Completion) -> dict[str, Any]:
        """See `Api`."""
        content: list[dict[str, Any]] = [{"type": "text", "text": answer.text}] if answer.text else []
        content += (
            {"type": "tool_use", "id": call["id"], "name": call["name"], "input": json.loads(call["arguments"])} for call in answer.calls
        )
        used = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.sampled_tokens}
        head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": request.model}
        return {**head, "content": content, **_stopped(answer), "usage": used}

    def events(self, request: CompletionRequest, answer: Completion) -> bytes:
        """See `Api`."""
        whole = self.whole(request, answer)
        made: list[dict[str, Any]] = [{"type": "message_start", "message": {**whole, "content": [], "stop_reason": None}}]
        for at, block in enumerate(whole["content"]):
            if block["type"] == "text":
                begun, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                begun, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            made.append({"type": "content_block_start", "index": at, "content_block": begun})
            made.append({"type": "content_block_delta", "index": at, "delta": delta})
            made.append({"type": "content_block_stop", "index": at})
        made.append({"type": "message_delta", "delta": _stopped(answer), "usage": whole["usage"]})
        return b"".join(map(event, (*made, {"type": "message_stop"})))

    def error(self, refused: RequestRefused) -> dict[str, Any]:
        """See `Api`."""
        kind = _ERRORS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(refused)}}


def _stopped(answer: Completion) -> dict[str, Any]:
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(answer.finish, "end_turn")
    if answer.stopped_by is not None and not answer.calls:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stopped_by if reason == "stop_sequence" else None}


def _messages(messages: Sequence[object]) -> list[Message]:
    """Return messages in normal form; results of tools become messages of their own."""
    made: list[Message] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or set(message) != {"role", "content"} or message["role"] not in _ROLES:
            raise wrong(where, f"must be an object with a role of {', '.join(_ROLES)} and a content")
        role, content, where = message["role"], message["content"], f"{where}.content"
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise wrong(where, "must be text or a list of blocks")
        if role == "system":
            made.append({"role": role, "content": text_of(blocks, where)})
        else:
            made += [_assistant(blocks, where)] if role == "assistant" else _user(blocks, where)
    if made[-1]["role"] == "assistant":
        raise wrong("messages", "must end with a message of the user; prefilling the policy's answer is not supported")
    return made


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> Message:
    text = text_of([block for block in blocks if block.get("type") != "tool_use"], where)
    calls = []
    for block in blocks:
        if block.get("type") == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise wrong(where, "must have an object as the input of a tool_use")
            named = {key: text_of(block.get(key), f"{where}.{key}") for key in ("id", "name")}
            calls.append({**named, "arguments": json.dumps(block["input"])})
    return assistant(text, calls)


def _user(blocks: Sequence[Mapping[str, Any]], where: str) -> list[Message]:
    made: list[Message] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            told, call = text_of(block.get("content", ""), where), text_of(block.get("tool_use_id"), f"{where}.tool_use_id")
            made.append({"role": "tool", "content": f"error: {told}" if block.get("is_error") else told, "tool_call_id": call})
        else:
            before = made.pop()["content"] if made and made[-1]["role"] == "user" else ""
            made.append({"role": "user", "content": before + text_of([block], where)})
    return made or [{"role": "user", "content": ""}]
