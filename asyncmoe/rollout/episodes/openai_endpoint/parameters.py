"""How a request's parameters are handled, whichever API the client speaks.

The run determines how tokens are sampled, because what is sampled is trained on. A parameter that ends a response earlier (a limit, a stop
text, one tool call) is honoured. A parameter that asks for other sampling is overridden by the run's own value, and the client is told. A
parameter that would change the policy's input is never dropped: it is honoured or refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from asyncmoe.engines.types import Sampling
from asyncmoe.rollout.episodes.listening import wrong_stop
from asyncmoe.rollout.episodes.openai_endpoint.conversation import Message, PolicyRequest
from asyncmoe.rollout.episodes.openai_endpoint.request import MODEL, Completion, CompletionRequest, RequestRefused, for_template, wrong
from asyncmoe.rollout.episodes.tools.tool import read_json

_CACHE = ("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options")
_NO_MATTER = ("user", "metadata", "client_metadata", "store", "safety_identifier", "service_tier", "prediction", *_CACHE)
"""Parameters that do not affect a response."""
_HINTS = ("reasoning_effort", "verbosity")
"""Parameters that change the style of other vendors' models."""
_KINDS = {bool: "true or false", int: "a whole number", str: "text", list: "a list", dict: "an object"}


class Fields:
    """The parameters of one request: an API takes out those that it knows, and `request` refuses the rest. Null counts as absent.

    Attributes:
        given: all of them.
        sampling: the run's own.
        overridden: names of parameters that differ from the run's sampling and chat template, which apply instead.

    Raises:
        RequestRefused: 400: the body is not a JSON object. All methods raise it, too, naming the parameter.
    """

    def __init__(self, body: bytes, sampling: Sampling) -> None:
        self.given, self.sampling, self.overridden = _object(body), sampling, list[str]()
        self._left = dict(self.given)

    def override(self, name: str, asked: object) -> None:
        """Note that a parameter is overridden, if it asks for anything."""
        if asked and name not in self.overridden:
            self.overridden.append(name)

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """Take out a parameter, which must be of type `kind`."""
        if name not in self._left:
            return default
        value = self._left.pop(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise wrong(name, f"must be {_KINDS[kind]}")
        return value

    def anything(self, name: str, default: object = None) -> Any:
        """Take out a parameter of any kind."""
        return self._left.pop(name, default)

    def some(self, name: str) -> list[Any]:
        """Take out a list of at least one item."""
        found = self.anything(name)
        if not isinstance(found, list) or not found:
            raise wrong(name, "must be a list of at least one item")
        return found

    def limit(self, *names: str) -> int | None:
        """Take out the limit on a response's tokens: the least of several."""
        given = {name: value for name in names if (value := self.take(name, int)) is not None}
        if wrong_one := next((name for name, value in given.items() if value < 1), None):
            raise wrong(wrong_one, "must be a positive whole number")
        return min(given.values(), default=None)

    def stops(self, name: str) -> tuple[str, ...]:
        """Take out stop texts."""
        value = self.anything(name, [])
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise wrong(name, "must be a text or a list of texts")
        if (why := wrong_stop(stops, 0)) is not None:
            raise wrong(name, f"cannot be {why}")
        return tuple(stops)

    def request(self, messages: Sequence[Message], tools: Sequence[Message], calls: bool, **more: Any) -> CompletionRequest:
        """Return the request, with the parameters that all APIs have.

        Args:
            calls: the policy may call `tools`; else it does not see them.
            more: fields of `CompletionRequest`.
        """
        model, stream = self.take("model", str, MODEL), self.take("stream", bool, False)
        variables = self.take("chat_template_kwargs", dict, {})
        self._check_sampling()
        for name in _HINTS:
            self.override(name, self.anything(name))
        for name in _NO_MATTER:
            self.anything(name)
        if self._left:
            raise wrong(str(min(self._left))[:100], "is not supported. Leave it out")
        asked = PolicyRequest(tuple(messages), tuple(for_template(messages)), tuple(tools if calls else ()), variables)
        return CompletionRequest(model, asked, stream=stream, calls=calls, fields=self.given, **more)

    def _check_sampling(self) -> None:
        own_k = -1 if self.sampling.top_k is None else self.sampling.top_k
        run = {"temperature": self.sampling.temperature, "top_p": self.sampling.top_p, "top_k": own_k, "min_p": self.sampling.min_p}
        run |= {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
        for name in (*run, "seed", "logit_bias", "logprobs", "top_logprobs"):
            value = self.anything(name)
            same = value is None or value == run.get(name) or (name == "top_k" and own_k == -1 and value == 0)
            self.override(name, not same and value is not False and value != {})


def _object(body: bytes) -> dict[str, Any]:
    try:
        fields = read_json(body)
    except ValueError as error:
        raise RequestRefused(400, f"the body is not valid JSON: {str(error)[:200]}") from error
    if not isinstance(fields, dict):
        raise RequestRefused(400, "the body must be a JSON object")
    return {key: value for key, value in fields.items() if value is not None}


def text_of(content: object, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return text that is given as a string or in parts.

    Raises:
        RequestRefused: a part is not text.
    """
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get("text"), str) for part in content):
            raise wrong(where, "must be text; other parts are not supported")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise wrong(where, "must be text")
    return content


def function(fields: Fields, tool: object, where: str, kind: str, schema: str, more: Sequence[str] = ()) -> Message:
    """Return a client's tool in the form chat templates accept.

    Args:
        kind: its type, which may be left out if it is "custom".
        schema: the key of its arguments' schema.
        more: other keys that it may have.

    Raises:
        RequestRefused: it is not such a tool.
    """
    if not isinstance(tool, dict) or (tool.get("type") or "custom") != kind:
        raise wrong(where, "must be a function that the client runs; tools of a server are not supported")
    if unknown := set(tool) - {"type", "name", "description", "strict", "allowed_callers", schema, *more}:
        raise wrong(f"{where}.{min(unknown)}", "is not supported. Leave it out")
    told = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get(schema)}
    if not all(isinstance(value, wanted) for value, wanted in zip(told.values(), (str, str | None, dict | None), strict=True)):
        raise wrong(where, "must have a name, and may have a description and a JSON schema")
    fields.override("tools.strict", tool.get("strict"))
    return {"type": "function", "function": {key: value for key, value in told.items() if value is not None}}


class Api(Protocol):
    """An API that clients speak: its requests and its answers."""

    def parse(self, fields: Fields) -> CompletionRequest:
        """Parse a request.

        Raises:
            RequestRefused: 400, naming the parameter.
        """

    def whole(self, request: CompletionRequest, answer: Completion) -> dict[str, Any]:
        """Return the answer to a request without `stream`."""

    def events(self, request: CompletionRequest, answer: Completion) -> bytes:
        """Return the answer to a request with `stream`, as server-sent events."""

    def error(self, refused: RequestRefused) -> dict[str, Any]:
        """Return the body of an error, by default in OpenAI's form."""
        kind = "invalid_request_error" if refused.status < 500 else "server_error"
        return {"error": {"message": str(refused), "type": kind, "param": refused.parameter, "code": refused.code}}
