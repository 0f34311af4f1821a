"""What becomes of a request's parameters, whichever API the client speaks.

The run determines how tokens are sampled, because what is sampled is trained on. A parameter that ends a response earlier (a limit, a stop
text, one tool call) is honoured. A parameter that asks for other sampling is a conflict: by `environment.on_conflict`, the run's own value
is used and the client is told, or the request is refused. A parameter that would change what the policy is asked is never dropped: it is
honoured or refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncmoe.engines.types import Sampling
from asyncmoe.rollout.episodes.listening import wrong_stop
from asyncmoe.rollout.episodes.openai_endpoint.conversation import Message
from asyncmoe.rollout.episodes.openai_endpoint.request import OnConflict, RequestRefused, wrong

MAX_CHOICES = 16
NO_MATTER = frozenset(
    {
        "user",
        "metadata",
        "client_metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "service_tier",
        "prediction",
    }
)
"""Parameters that do not affect a response."""
_HINTS = frozenset({"reasoning_effort", "verbosity"})
"""Parameters that ask models of other vendors for another style."""


@dataclass
class Conflicts:
    """Parameters of a request that ask for other sampling than the run's.

    Attributes:
        names: the parameters that the run's own values override.
    """

    on_conflict: OnConflict
    names: list[str] = field(default_factory=list)

    def note(self, name: str, message: str) -> None:
        """Override a parameter.

        Raises:
            RequestRefused: `on_conflict` is "refuse".
        """
        if self.on_conflict == "refuse":
            raise wrong(name, f"{message}. The run and its chat template decide: leave it out, or set environment.on_conflict to run")
        if name not in self.names:
            self.names.append(name)


def body_fields(body: bytes) -> dict[str, Any]:
    """Parse the body of a request; a parameter that is null is left out.

    Raises:
        RequestRefused: 400.
    """
    try:
        fields = json.loads(body)
        # A lone surrogate is valid JSON but not encodable text; nesting too deep to serialize here is also too deep for templates.
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, f"the body is not valid JSON: {str(error)[:200]}") from error
    if not isinstance(fields, dict):
        raise RequestRefused(400, "the body must be a JSON object")
    return {key: value for key, value in fields.items() if value is not None}


def check_sampling(fields: dict[str, Any], sampling: Sampling, conflicts: Conflicts) -> None:
    """Take the parameters of sampling out of `fields`, and those that do not matter; what is left over is not known.

    Raises:
        RequestRefused: 400, naming the parameter.
    """
    run = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "repetition_penalty": 1,
        "seed": None,
    }
    for name, own in run.items():
        value = fields.pop(name, None)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value < math.inf:
            raise wrong(name, "must be a number")
        if value != own and not (name == "top_k" and value <= 0 and own == -1):
            is_own = "is the engine's" if own is None else f"is the run's {own:g}"
            conflicts.note(name, f"{is_own} and cannot be {value!r:.100}")
    bias = fields.pop("logit_bias", {})
    if not isinstance(bias, dict):
        raise wrong("logit_bias", "must be an object")
    if bias:
        conflicts.note("logit_bias", "cannot change the distribution")
    for name in list(fields):
        if name in _HINTS:
            conflicts.note(name, "is not known to the policy")
        if name in _HINTS or name in NO_MATTER:
            del fields[name]


def refuse_rest(fields: Mapping[str, Any]) -> None:
    """Refuse what is left of a request.

    Raises:
        RequestRefused: 400, naming the first parameter.
    """
    if fields:
        raise wrong(str(min(fields))[:100], "is not supported. Leave it out")


def taken(fields: dict[str, Any], name: str, kind: type | tuple[type, ...], expected: str, default: Any = None) -> Any:
    """Take a parameter out of a request.

    Raises:
        RequestRefused: it is not of the kind.
    """
    value = fields.pop(name, default)
    if value is None and default is None:
        return None
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kinds):
        raise wrong(name, f"must be {expected}")
    return value


def limit(fields: dict[str, Any], *names: str) -> int | None:
    """Take the limit on a response's tokens out of a request: the least of several.

    Raises:
        RequestRefused: it is not a positive whole number.
    """
    given = {name: value for name in names if (value := taken(fields, name, int, "a positive whole number")) is not None}
    if wrong_one := next((name for name, value in given.items() if value < 1), None):
        raise wrong(wrong_one, "must be a positive whole number")
    return min(given.values(), default=None)


def stop_texts(value: object, name: str) -> tuple[str, ...]:
    """Return stop texts.

    Raises:
        RequestRefused: they are not texts, too many, empty or too long.
    """
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong(name, "must be a text or a list of texts")
    if (why := wrong_stop(stops, 0)) is not None:
        raise wrong(name, f"cannot be {why}")
    return tuple(stops)


def text_of(content: object, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return text given as such or in parts.

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


def function(name: object, description: object, parameters: object, where: str) -> Message:
    """Return a tool in the form chat templates accept.

    Raises:
        RequestRefused: its parts are of the wrong kinds.
    """
    if not isinstance(name, str) or not isinstance(description, str | None) or not isinstance(parameters, dict | None):
        raise wrong(where, "must have a name, and may have a description and a JSON schema")
    told = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in told.items() if value is not None}}
