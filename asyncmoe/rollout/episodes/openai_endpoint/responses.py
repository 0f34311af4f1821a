"""OpenAI's Responses API.

Source: OpenAI's API reference, "Create a model response", "The response object" and "Streaming events". To the policy, a function of a
namespace is named NAMESPACE__FUNCTION: letters and underscores, which every parser of calls accepts.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncmoe.rollout.episodes.openai_endpoint.chat import asks_for_format, may_call
from asyncmoe.rollout.episodes.openai_endpoint.conversation import Message
from asyncmoe.rollout.episodes.openai_endpoint.parameters import Api, Fields, function, text_of
from asyncmoe.rollout.episodes.openai_endpoint.request import Completion, CompletionRequest, RequestRefused, assistant, event, wrong

_ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("input_text", "output_text", "text")
_REMEMBERED = 32
"""Responses remembered: each holds the text of its conversation, and requests refer to recent ones."""


class ResponsesApi(Api):
    """The API for one episode: it remembers the episode's last answers for `previous_response_id`. See `Api`."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Message, ...]] = {}

    def parse(self, fields: Fields) -> CompletionRequest:
        """See `Api`.

        Raises:
            RequestRefused: 404: no such previous response.
        """
        instructions = fields.take("instructions", str)
        given = fields.anything("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list) or not items:
            raise wrong("input", "must be text or a list of at least one item")
        first: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
        messages = [*first, *self._before(fields), *_messages(items)]
        tools = _tools(fields)
        calls, one_call = may_call(fields, tools)
        most = fields.limit("max_output_tokens")
        _check_other(fields)
        fields.given |= {"temperature": fields.sampling.temperature, "top_p": fields.sampling.top_p}  # the answer shows values in effect
        return fields.request(messages, tools, calls, most=most, one_call=one_call)

    def whole(self, request: CompletionRequest, answer: Completion) -> dict[str, Any]:
        """See `Api`."""
        made = f"resp_{secrets.token_hex(12)}"
        if request.fields.get("store") is not False:
            history = request.asked.messages["instructions" in request.fields :]  # a later request has instructions of its own
            self._known[made] = (*history, answer.message)
            while len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
        cut = answer.finish == "length"
        used = {"input_tokens": answer.prompt_tokens, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
        used |= {"output_tokens": answer.sampled_tokens, "output_tokens_details": {"reasoning_tokens": 0}}
        return {
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            **{key: value for key, value in request.fields.items() if key not in ("input", "stream")},
            "id": made,
            "object": "response",
            "created_at": int(time.time()),
            "model": request.model,
            "error": None,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _output(request, answer),
            "usage": {**used, "total_tokens": answer.prompt_tokens + answer.sampled_tokens},
        }

    def events(self, request: CompletionRequest, answer: Completion) -> bytes:
        """See `Api`."""
        whole = self.whole(request, answer)
        begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        made: list[dict[str, Any]] = [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]
        for at, item in enumerate(whole["output"]):
            made += _item_events(item, at)
        made.append({"type": f"response.{whole['status']}", "response": whole})
        return b"".join(event({**one, "sequence_number": number}) for number, one in enumerate(made))

    def _before(self, fields: Fields) -> tuple[Message, ...]:
        """Take the previous response out of a request; return the messages up to it."""
        previous = fields.take("previous_response_id", str)
        if previous is not None and previous not in self._known:
            said = f"no response {previous[:80]!r} among the last {_REMEMBERED} of this episode"
            raise RequestRefused(404, said, parameter="previous_response_id")
        return self._known.get(previous, ())


def _output(request: CompletionRequest, answer: Completion) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        status = "incomplete" if answer.finish == "length" else "completed"
        made.append({"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "status": status, "content": [part]})
    for call in answer.calls:
        begun = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "completed", "call_id": call["id"]}
        made.append({**begun, **_client_name(request.fields.get("tools", ()), call["name"]), "arguments": call["arguments"]})
    return made


def _item_events(item: Mapping[str, Any], at: int) -> Iterator[dict[str, Any]]:
    """Yield the events of one item of an answer's output."""
    place: dict[str, Any] = {"item_id": item["id"], "output_index": at}
    empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
    yield {"type": "response.output_item.added", "output_index": at, "item": {**item, "status": "in_progress", **empty}}
    if item["type"] == "message":
        (part,) = item["content"]
        place, text = {**place, "content_index": 0}, part["text"]
        yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
        yield {"type": "response.output_text.delta", **place, "delta": text, "logprobs": []}
        yield {"type": "response.output_text.done", **place, "text": text, "logprobs": []}
        yield {"type": "response.content_part.done", **place, "part": part}
    else:
        yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **place, "name": item["name"], "arguments": item["arguments"]}
    yield {"type": "response.output_item.done", "output_index": at, "item": item}


def _messages(items: Sequence[Any]) -> list[Message]:
    """Return messages in normal form. A call belongs to the assistant's message before it, as the policy sampled both at once."""
    messages: list[Message] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            messages.append(_message(item, where))
        elif kind == "function_call":
            parts = {"id": "call_id", "name": "name", "arguments": "arguments"}
            call = {key: text_of(item.get(name), f"{where}.{name}") for key, name in parts.items()}
            if item.get("namespace") is not None:
                call["name"] = _full_name(text_of(item["namespace"], f"{where}.namespace"), call["name"])
            last: Message = messages.pop() if messages and messages[-1]["role"] == "assistant" else {"content": ""}
            messages.append(assistant(last["content"], [*last.get("tool_calls", ()), call]))
        elif kind == "function_call_output":
            told, call_id = text_of(item.get("output"), f"{where}.output", _TEXTS), text_of(item.get("call_id"), f"{where}.call_id")
            messages.append({"role": "tool", "content": told, "tool_call_id": call_id})
        else:
            raise wrong(where, "must be a message, a function_call or a function_call_output")
    return messages


def _message(item: Mapping[str, Any], where: str) -> Message:
    if item.get("role") not in _ROLES:
        raise wrong(where, f"must have a role of {', '.join(_ROLES)}")
    if unknown := {key for key in item if item[key] not in (None, "", [], {})} - {"type", "role", "content", "id", "status", "phase"}:
        raise wrong(f"{where}.{min(unknown)}", "is not supported")
    return {"role": item["role"], "content": text_of(item.get("content"), f"{where}.content", _TEXTS)}


def _tools(fields: Fields) -> list[Message]:
    """Take the functions out of a request, alone and in namespaces."""
    made: list[Message] = []
    given = fields.take("tools", list, [])
    for i, tool in enumerate(given):
        where = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "namespace":
            made.append(function(fields, tool, where, "function", "parameters"))
            continue
        name, inner = text_of(tool.get("name"), f"{where}.name"), tool.get("tools")
        if not isinstance(inner, list) or set(tool) - {"type", "name", "description", "tools"}:
            raise wrong(where, "must have a name, a description and a list of tools")
        for j, one in enumerate(inner):
            told = function(fields, one, f"{where}.tools[{j}]", "function", "parameters")["function"]
            made.append({"type": "function", "function": {**told, "name": _full_name(name, told["name"])}})
    names = [tool["function"]["name"] for tool in made]
    if any(tool["type"] == "namespace" for tool in given) and len(set(names)) < len(names):
        raise wrong("tools", "must have different names; a function of a namespace is named NAMESPACE__FUNCTION")
    return made


def _full_name(namespace: str, name: str) -> str:
    return f"{namespace}__{name}"


def _client_name(tools: Sequence[Mapping[str, Any]], name: str) -> dict[str, str]:
    """Return the client's name of a function that the policy called, with its namespace if it has one."""
    for tool in tools:
        if tool["type"] == "namespace" and any(name == _full_name(tool["name"], one["name"]) for one in tool["tools"]):
            return {"name": name.removeprefix(_full_name(tool["name"], "")), "namespace": tool["name"]}
    return {"name": name}


def _check_other(fields: Fields) -> None:
    """Take out of a request the parameters about the form of a response, or about OpenAI's service and models."""
    text = fields.take("text", dict, {})
    fields.override("text.format", asks_for_format(text.get("format")))
    fields.override("text.verbosity", text.get("verbosity"))
    fields.take("stream_options", dict)
    fields.override("include", "message.output_text.logprobs" in fields.take("include", list, []))
    fields.override("reasoning", any(value is not None for value in fields.take("reasoning", dict, {}).values()))
    fields.override("max_tool_calls", fields.take("max_tool_calls", int) is not None)
    fields.override("truncation", fields.anything("truncation", "disabled") != "disabled")
    if fields.take("background", bool, False):
        raise wrong("background", "is not supported. Leave it out")
