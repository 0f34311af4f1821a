"""A request for a completion and its answer, whichever API the client speaks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from asyncmoe.rollout.chat_template import CallArguments
from asyncmoe.rollout.episodes.openai_endpoint.conversation import Message, PolicyRequest

MODEL = "policy"


class RequestRefused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, *, code: str | None = None, parameter: str | None = None) -> None:
        self.status, self.code, self.parameter = status, code, parameter
        super().__init__(message)


def event(content: Mapping[str, Any]) -> bytes:
    """Return a server-sent event, named after its content's type if it has one."""
    named = f"event: {content['type']}\n" if "type" in content else ""
    return f"{named}data: {json.dumps(content)}\n\n".encode()


def wrong(parameter: str, message: str) -> RequestRefused:
    """Return the refusal of a parameter."""
    return RequestRefused(400, f"{parameter} {message}", parameter=parameter, code="unsupported_or_invalid")


@dataclass(frozen=True)
class CompletionRequest:
    """A request for a completion.

    Attributes:
        model: the client's name for the model. The model is always the policy; the name is that of the agent.
        most: maximum tokens of the response; None: the run's maximum.
        stream: True if the answer is streamed.
        usage: True if a stream ends with token counts.
        calls: True if the response is searched for tool calls.
        one_call: True if the response ends with its first tool call.
        stops: texts that end the response; the client gets the text before them.
        fields: the request as received, for APIs that repeat it.
    """

    model: str
    asked: PolicyRequest
    most: int | None = None
    stream: bool = False
    usage: bool = False
    calls: bool = False
    one_call: bool = False
    stops: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """The policy's response, as the client receives it.

    Attributes:
        text: without tool calls and stop text.
        calls: each with "id", "name" and "arguments", which is JSON text.
        finish: "stop", "length" or "tool_calls".
        prompt_tokens, sampled_tokens: counts.
        stopped_by: the client's stop text that ended it, or None.
        path: name of the answer's path in the tree of turns.
    """

    text: str
    calls: tuple[Mapping[str, str], ...]
    finish: str
    prompt_tokens: int
    sampled_tokens: int
    stopped_by: str | None = None
    path: str = ""

    @property
    def message(self) -> Message:
        """The answer in the normal form of messages, for comparison when a later request contains it."""
        return assistant(self.text, self.calls)


def assistant(text: str, calls: Sequence[Mapping[str, str]]) -> Message:
    """Return the policy's message in normal form. Arguments are compared as JSON values, because clients serialise them again."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [{**call, "arguments": canonical(call["arguments"])} for call in calls]
    return message


def canonical(arguments: str) -> str:
    """Return the same text for all JSON texts of equal value, 1.0 and 1 included; return other text unchanged."""
    try:
        value = json.loads(arguments, parse_float=_number)
    except (ValueError, RecursionError):
        return arguments
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _for_template(message: Message) -> Message:
    """Return a message in the form chat templates accept: call arguments are objects, and the role developer becomes system."""
    message = {**message, "role": "system"} if message["role"] == "developer" else message
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        try:
            arguments = CallArguments(json.loads(call["arguments"]))
        except (TypeError, ValueError, RecursionError):
            arguments = call["arguments"]
        calls.append({"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def for_template(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages in the form chat templates accept, results of tools in the order of their calls: few templates show the ids that tell
    them apart."""
    order = {call["id"]: number for message in messages for number, call in enumerate(message.get("tool_calls", ()))}
    for _, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        ordered = sorted(group, key=lambda message: order.get(message.get("tool_call_id", ""), len(order)))
        yield from map(_for_template, ordered)
