"""OpenAI's Responses API.

Source: OpenAI's API reference, "Create a model response", "The response object" and "Streaming events".
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from asyncmoe.engines.types import Sampling
from asyncmoe.rollout.episodes.openai_endpoint.chat import check_choice, check_format, event, model_of, token_logprobs
from asyncmoe.rollout.episodes.openai_endpoint.conversation import Message
from asyncmoe.rollout.episodes.openai_endpoint.parameters import (
    Conflicts,
    body_fields,
    check_sampling,
    limit,
    refuse_rest,
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
from asyncmoe.rollout.episodes.openai_endpoint.responses_tools import client_name, full_name, tools_of

_ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("input_text", "output_text", "text")
_REMEMBERED = 32
"""Each response remembered holds the text of its conversation, and the next request names one of the last."""
_LOGPROBS = "message.output_text.logprobs"


class ResponsesApi:
    """The API for one episode: it remembers the episode's last answers for `previous_response_id`."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Message, ...]] = {}

    def parse(self, body: bytes, sampling: Sampling, on_conflict: OnConflict) -> CompletionRequest:
        """Parse a request.

        Raises:
            RequestRefused: 400, naming the parameter; 404: no such previous response.
        """
        given = body_fields(body)
        fields, conflicts = dict(given), Conflicts(on_conflict)
        model, stream = model_of(fields), taken(fields, "stream", bool, "true or false", False)
        instructions = taken(fields, "instructions", str, "text")
        history = (*self._before(fields), *_items(fields.pop("input", None)))
        first: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
        tools = tools_of(taken(fields, "tools", list, "a list", []), conflicts)
        calls = check_choice(fields.pop("tool_choice", "auto"), conflicts) and bool(tools)
        one_call = calls and not taken(fields, "parallel_tool_calls", bool, "true or false", True)
        most = limit(fields, "max_output_tokens")
        if taken(fields, "max_tool_calls", int, "a whole number") is not None:
            conflicts.note("max_tool_calls", "is not counted here")
        if taken(fields, "top_logprobs", int, "a whole number", 0):
            conflicts.note("top_logprobs", "is not recorded for other tokens than the sampled one")
        _check_text(fields, conflicts)
        include, variables = taken(fields, "include", list, "a list", []), taken(fields, "chat_template_kwargs", dict, "an object", {})
        _check_service(fields, conflicts)
        check_sampling(fields, sampling, conflicts)
        refuse_rest(fields)
        return CompletionRequest(
            model,
            policy_request((*first, *history), tools if calls else (), variables),
            most,
            stream,
            calls=calls,
            one_call=one_call,
            logprobs=_LOGPROBS in include,
            overridden=tuple(conflicts.names),
            fields={**given, "temperature": sampling.temperature, "top_p": sampling.top_p},
            history=history,
        )

    def whole(self, request: CompletionRequest, answers: Sequence[Completion]) -> dict[str, Any]:
        """Return the answer to a request without `stream`."""
        (answer,) = answers
        return self.ended(request, _head(request), answer, _output(request, answer, f"msg_{secrets.token_hex(12)}"))

    def stream(self, request: CompletionRequest) -> ResponsesStream:
        """Return the writer of an answer to a request with `stream`."""
        return ResponsesStream(self, request)

    def error(self, refused: RequestRefused) -> dict[str, Any]:
        """Return the body of an error."""
        return refused.body()

    def ended(self, request: CompletionRequest, head: Mapping[str, Any], answer: Completion, output: list[Any]) -> dict[str, Any]:
        """Return the whole response, and remember it."""
        if request.fields.get("store") is not False:
            self._known[head["id"]] = (*request.history, answer.message)
            while len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
        cut = answer.finish == "length"
        reason = {"reason": "max_output_tokens"} if cut else None
        used = {"input_tokens": answer.prompt_tokens, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
        used |= {"output_tokens": answer.sampled_tokens, "output_tokens_details": {"reasoning_tokens": 0}}
        used["total_tokens"] = answer.prompt_tokens + answer.sampled_tokens
        return {**head, "status": "incomplete" if cut else "completed", "incomplete_details": reason, "output": output, "usage": used}

    def _before(self, fields: dict[str, Any]) -> tuple[Message, ...]:
        """Take the previous response out of a request; return the messages up to it."""
        previous = taken(fields, "previous_response_id", str, "text")
        if previous is None:
            return ()
        if previous not in self._known:
            raise RequestRefused(
                404, f"no response {previous[:80]!r} among the last {_REMEMBERED} of this episode", parameter="previous_response_id"
            )
        return self._known[previous]


class ResponsesStream:
    """Writes one answer as server-sent events."""

    def __init__(self, api: ResponsesApi, request: CompletionRequest) -> None:
        self._api, self._request, self._head = api, request, _head(request)
        self._item = f"msg_{secrets.token_hex(12)}"
        self._number = 0
        self._spoke = False

    def begin(self) -> bytes:
        """Return the events before the first text."""
        return self._event("response.created", response=self._head) + self._event("response.in_progress", response=self._head)

    def text(self, piece: str) -> bytes:
        """Return the events of a piece of text."""
        made = b"" if self._spoke else self._message()
        return made + self._event("response.output_text.delta", **self._place(), delta=piece, logprobs=[])

    def end(self, answer: Completion) -> bytes:
        """Return the events after the last text."""
        output = _output(self._request, answer, self._item)
        made = b"".join(self._done(item, at) for at, item in enumerate(output))
        whole = self._api.ended(self._request, self._head, answer, output)
        return made + self._event(f"response.{whole['status']}", response=whole)

    def failed(self, refused: RequestRefused) -> bytes:
        """Return the events of an answer that cannot be completed."""
        error = {"code": "server_error", "message": str(refused)}
        return self._event("response.failed", response={**self._head, "status": "failed", "error": error})

    def _message(self) -> bytes:
        self._spoke = True
        item = {"id": self._item, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        made = self._event("response.output_item.added", output_index=0, item=item)
        return made + self._event("response.content_part.added", **self._place(), part=part)

    def _done(self, item: Mapping[str, Any], at: int) -> bytes:
        if item["type"] == "message":
            (part,) = item["content"]
            made = b"" if self._spoke else self._message()
            made += self._event("response.output_text.done", **self._place(), text=part["text"], logprobs=part["logprobs"])
            made += self._event("response.content_part.done", **self._place(), part=part)
        else:
            begun, place = {**item, "status": "in_progress", "arguments": ""}, {"item_id": item["id"], "output_index": at}
            made = self._event("response.output_item.added", output_index=at, item=begun)
            made += self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            made += self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"])
        return made + self._event("response.output_item.done", output_index=at, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **content: object) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **content}, kind)


def _head(request: CompletionRequest) -> dict[str, Any]:
    """Return the response object before it has an answer; it repeats the request's parameters, with the run's own sampling."""
    repeated: dict[str, Any] = {
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "user": None,
    }
    given = {key: request.fields.get(key, value) for key, value in repeated.items()}
    head = {"id": f"resp_{secrets.token_hex(12)}", "object": "response", "created_at": int(time.time()), "status": "in_progress"}
    return {**head, "error": None, "incomplete_details": None, "model": request.model, "output": [], "usage": None, **given}


def _output(request: CompletionRequest, answer: Completion, item: str) -> list[dict[str, Any]]:
    status = "incomplete" if answer.finish == "length" else "completed"
    made: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        logprobs = token_logprobs(answer) if request.logprobs else []
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": logprobs}
        made.append({"id": item, "type": "message", "role": "assistant", "status": status, "content": [part]})
    for call in answer.calls:
        begun = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "completed", "call_id": call.id}
        made.append({**begun, **client_name(request.fields.get("tools"), call.name), "arguments": call.arguments})
    return made


def _items(given: object) -> list[Message]:
    """Return messages in normal form. A call belongs to the assistant's message before it, as the policy said both at once."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise wrong("input", "must be text or a list of at least one item")
    messages: list[Message] = []
    for i, item in enumerate(given):
        where = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            messages.append(_message(item, where))
        elif kind == "function_call":
            call = {key: text_of(item.get(name), f"{where}.{name}") for key, name in (("id", "call_id"), ("name", "name"), _ARGUMENTS)}
            if item.get("namespace") is not None:
                call["name"] = full_name(text_of(item["namespace"], f"{where}.namespace"), call["name"])
            last: Message = messages.pop() if messages and messages[-1]["role"] == "assistant" else {"content": ""}
            messages.append(assistant(last["content"], [*last.get("tool_calls", ()), call]))
        elif kind == "function_call_output":
            told, call_id = text_of(item.get("output"), f"{where}.output", _TEXTS), text_of(item.get("call_id"), f"{where}.call_id")
            messages.append({"role": "tool", "content": told, "tool_call_id": call_id})
        else:
            raise wrong(where, "must be a message, a function_call or a function_call_output")
    return messages


_ARGUMENTS = ("arguments", "arguments")


def _message(item: Mapping[str, Any], where: str) -> Message:
    if item.get("role") not in _ROLES:
        raise wrong(where, f"must have a role of {', '.join(_ROLES)}")
    if unknown := {key for key in item if item[key] not in (None, "", [], {})} - {"type", "role", "content", "id", "status", "phase"}:
        raise wrong(f"{where}.{min(unknown)}", "is not supported")
    return {"role": item["role"], "content": text_of(item.get("content"), f"{where}.content", _TEXTS)}


def _check_text(fields: dict[str, Any], conflicts: Conflicts) -> None:
    text = {key: value for key, value in taken(fields, "text", dict, "an object", {}).items() if value is not None}
    check_format(text.pop("format", {"type": "text"}), "text.format", conflicts)
    if text.pop("verbosity", None) is not None:
        conflicts.note("text.verbosity", "is not known to the policy")
    if text:
        raise wrong(f"text.{min(text)}", "is not supported. Leave it out")


def _check_service(fields: dict[str, Any], conflicts: Conflicts) -> None:
    """Take parameters out of a request that are about OpenAI's service and models."""
    taken(fields, "stream_options", dict, "an object", {})
    if any(value is not None for value in taken(fields, "reasoning", dict, "an object", {}).values()):
        conflicts.note("reasoning", "is not known to the policy")
    if fields.pop("truncation", "disabled") != "disabled":
        conflicts.note("truncation", "is never done")
    if taken(fields, "background", bool, "true or false", False):
        raise wrong("background", "is not supported. Leave it out")
