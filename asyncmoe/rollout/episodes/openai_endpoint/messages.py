"""Anthropic's Messages API.

Source: Anthropic's API reference, "Create a Message", "Count tokens in a Message" and "Streaming Messages".
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from asyncmoe.engines.types import Sampling
from asyncmoe.rollout.episodes.openai_endpoint.chat import event, model_of
from asyncmoe.rollout.episodes.openai_endpoint.conversation import Message
from asyncmoe.rollout.episodes.openai_endpoint.parameters import (
    Conflicts,
    body_fields,
    check_sampling,
    function,
    limit,
    refuse_rest,
    stop_texts,
    taken,
    text_of,
)
from asyncmoe.rollout.episodes.openai_endpoint.request import (
    Completion,
    CompletionRequest,
    OnConflict,
    RequestRefused,
    assistant,
    policy_request,
    wrong,
)

_ROLES = ("user", "assistant", "system")
_NO_MATTER = frozenset({"cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id"})
"""Parameters that do not affect a response, besides `parameters.NO_MATTER`."""
_TOOL = frozenset({"name", "description", "input_schema", "type", "strict", "cache_control", "eager_input_streaming", "allowed_callers"})
_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class MessagesApi:
    """The API: `parse` a request, and answer it `whole` or as a `stream`."""

    def parse(self, body: bytes, sampling: Sampling, on_conflict: OnConflict) -> CompletionRequest:
        """Parse a request.

        Raises:
            RequestRefused: 400, naming the parameter.
        """
        given = body_fields(body)
        fields, conflicts = dict(given), Conflicts(on_conflict)
        model, stream = model_of(fields), taken(fields, "stream", bool, "true or false", False)
        system = text_of(fields.pop("system", ""), "system")
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        messages += _messages(fields.pop("messages", None))
        tools = [_tool(tool, f"tools[{i}]", conflicts) for i, tool in enumerate(taken(fields, "tools", list, "a list", []))]
        choice = taken(fields, "tool_choice", dict, "an object", {"type": "auto"})
        calls = _calls(choice, conflicts) and bool(tools)
        stops = stop_texts(fields.pop("stop_sequences", []), "stop_sequences")
        most, variables = limit(fields, "max_tokens"), taken(fields, "chat_template_kwargs", dict, "an object", {})
        for name in ("thinking", "output_config", "context_management"):
            if taken(fields, name, dict, "an object", {}) not in ({}, {"type": "disabled"}):
                conflicts.note(name, "is not known to the policy")
        fields = {name: value for name, value in fields.items() if name not in _NO_MATTER}
        check_sampling(fields, sampling, conflicts)
        refuse_rest(fields)
        return CompletionRequest(
            model,
            policy_request(messages, tools if calls else (), variables),
            most,
            stream,
            calls=calls,
            one_call=calls and choice.get("disable_parallel_tool_use") is True,
            stops=stops,
            overridden=tuple(conflicts.names),
            fields=given,
        )

    def whole(self, request: CompletionRequest, answers: Sequence[Completion]) -> dict[str, Any]:
        """Return the answer to a request without `stream`."""
        (answer,) = answers
        content: list[dict[str, Any]] = [{"type": "text", "text": answer.text}] if answer.text else []
        content += ({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)} for call in answer.calls)
        used = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.sampled_tokens}
        return {**_head(request), "content": content, **_stopped(answer), "usage": used}

    def stream(self, request: CompletionRequest) -> MessagesStream:
        """Return the writer of an answer to a request with `stream`."""
        return MessagesStream(request)

    def error(self, refused: RequestRefused) -> dict[str, Any]:
        """Return the body of an error."""
        kind = _ERRORS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(refused)}}


class MessagesStream:
    """Writes one answer as server-sent events."""

    def __init__(self, request: CompletionRequest) -> None:
        self._request = request
        self._blocks = 0

    def begin(self) -> bytes:
        """Return the events before the first text. The number of input tokens follows at the end."""
        empty = {**_head(self._request), "content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**empty, "usage": {"input_tokens": 0, "output_tokens": 0}})

    def text(self, piece: str) -> bytes:
        """Return the events of a piece of text."""
        made = b"" if self._blocks else self._start({"type": "text", "text": ""})
        return made + self._delta({"type": "text_delta", "text": piece})

    def end(self, answer: Completion) -> bytes:
        """Return the events after the last text."""
        made = self._stop() if self._blocks else b""
        for call in answer.calls:
            made += self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            made += self._delta({"type": "input_json_delta", "partial_json": call.arguments}) + self._stop()
        used = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.sampled_tokens}
        return made + _event("message_delta", delta=_stopped(answer), usage=used) + _event("message_stop")

    def failed(self, refused: RequestRefused) -> bytes:
        """Return the events of an answer that cannot be completed."""
        return event(MessagesApi().error(refused), "error")

    def _start(self, block: Mapping[str, Any]) -> bytes:
        self._blocks += 1
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _stop(self) -> bytes:
        return _event("content_block_stop", index=self._blocks - 1)


def _event(kind: str, **content: object) -> bytes:
    return event({"type": kind, **content}, kind)


def _head(request: CompletionRequest) -> dict[str, Any]:
    return {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": request.model}


def _stopped(answer: Completion) -> dict[str, Any]:
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(answer.finish, "end_turn")
    if answer.stopped_by is not None and not answer.calls:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stopped_by if reason == "stop_sequence" else None}


def _calls(choice: Mapping[str, Any], conflicts: Conflicts) -> bool:
    """Return True if the policy may call tools."""
    kind = choice.get("type")
    if kind in ("any", "tool"):
        conflicts.note("tool_choice", "cannot force a call")
    elif kind not in ("auto", "none"):
        raise wrong("tool_choice", "must have a type of auto, any, tool or none")
    return bool(kind != "none")


def _tool(tool: object, where: str, conflicts: Conflicts) -> Message:
    if not isinstance(tool, dict) or tool.get("type", "custom") not in ("custom", None):
        raise wrong(where, "must be a tool of the client's; tools that a server would run are not supported")
    if unknown := set(tool) - _TOOL:
        raise wrong(f"{where}.{min(unknown)}", "is not supported. Leave it out")
    if tool.get("strict"):
        conflicts.note("tools.strict", "cannot force arguments to a schema")
    return function(tool.get("name"), tool.get("description"), tool.get("input_schema"), where)


def _messages(messages: object) -> list[Message]:
    """Return messages in normal form; results of tools become messages of their own."""
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "must be a list of at least one message")
    made: list[Message] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or set(message) != {"role", "content"} or message["role"] not in _ROLES:
            raise wrong(where, f"must be an object with a role of {', '.join(_ROLES)} and a content")
        role, content = message["role"], message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise wrong(f"{where}.content", "must be text or a list of blocks")
        if role == "system":
            made.append({"role": role, "content": text_of(blocks, f"{where}.content")})
        else:
            made += [_assistant(blocks, where)] if role == "assistant" else _user(blocks, where)
    if made[-1]["role"] == "assistant":
        raise wrong("messages", "must end with a message of the user; the policy's answer cannot be begun for it")
    return made


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> Message:
    used = [block for block in blocks if block.get("type") == "tool_use"]
    text = text_of([block for block in blocks if block.get("type") != "tool_use"], f"{where}.content")
    calls = []
    for block in used:
        if not isinstance(block.get("input"), dict):
            raise wrong(f"{where}.content", "must have an object as the input of a tool_use")
        named = {key: text_of(block.get(key), f"{where}.content.{key}") for key in ("id", "name")}
        calls.append({**named, "arguments": json.dumps(block["input"])})
    return assistant(text, calls)


def _user(blocks: Sequence[Mapping[str, Any]], where: str) -> list[Message]:
    made: list[Message] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            told, name = text_of(block.get("content", ""), f"{where}.content"), text_of(block.get("tool_use_id"), f"{where}.tool_use_id")
            made.append({"role": "tool", "content": f"error: {told}" if block.get("is_error") else told, "tool_call_id": name})
        elif made and made[-1]["role"] == "user":
            made[-1] = {"role": "user", "content": made[-1]["content"] + text_of([block], f"{where}.content")}
        else:
            made.append({"role": "user", "content": text_of([block], f"{where}.content")})
    return made or [{"role": "user", "content": ""}]
