"""Finds tool calls in a model's response.

Two styles:

- `hermes`: `<tool_call>{"name": "calculator", "arguments": {"expression": "12+7"}}</tool_call>`, as Qwen and Hermes models are trained to.
- `brackets`: `[calculator: 12+7]`, or `[12+7]` for the first tool. For models so small that every token counts. An argument cannot contain
  "]" or a newline; ordinary text in brackets is read as a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.engines.types import ParsedCall
from asyncmoe.rollout.episodes.environment import ERROR, Agent, Response
from asyncmoe.rollout.episodes.tools import strict_json
from asyncmoe.rollout.tokenizer import Tokenizer

Style = Literal["hermes", "brackets"]
STYLES: Mapping[str, Style] = {"hermes": "hermes", "brackets": "brackets"}
"""The styles that `find` reads, by name; any other name is that of a parser of the engine (`parsed`)."""
MAX_CALLS = 16
"""Maximum number of calls in one response; the rest of the response is ignored."""
MAX_CHARACTERS = 65536
"""Maximum length of one call's arguments."""

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_NAMED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)[ \t]*:(.*)", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        start, end: range of its characters in the response.
        name: name of the tool, or None for the first tool. The caller checks that the tool exists.
        argument: argument of `Tool.call`: the string if the arguments are an object with one string, else `arguments`.
        arguments: the arguments as JSON text; in brackets, as written.
    """

    start: int
    end: int
    name: str | None
    argument: str
    arguments: str


@dataclass(frozen=True)
class Malformed:
    """Text that looks like a call but is invalid. `why` explains the error to the model."""

    start: int
    end: int
    why: str


def find(text: str, style: Style) -> tuple[Call | Malformed, ...]:
    """Return the calls in a response in order, at most `MAX_CALLS`, in time linear in the response's length."""
    found: list[Call | Malformed] = []
    begin, end = (OPEN, CLOSE) if style == "hermes" else ("[", "]")
    start = text.find(begin)
    while start >= 0 and len(found) < MAX_CALLS:
        stop = text.find(end, start + len(begin))
        if stop < 0:
            found.append(Malformed(start, len(text), f"error: {begin} without {end}"))
            break
        inner, after = text[start + len(begin) : stop], stop + len(end)
        if len(inner) > MAX_CHARACTERS:
            found.append(Malformed(start, after, f"error: a call of {len(inner)} characters, more than {MAX_CHARACTERS}"))
        else:
            found.append(_hermes(inner, start, after) if style == "hermes" else _brackets(inner, start, after))
        start = text.find(begin, after)
    return tuple(found)


async def read_by_engine(
    agent: Agent, response: Response, style: str, schemas: Sequence[Mapping[str, Any]], tokenizer: Tokenizer
) -> Sequence[ParsedCall]:
    """Return the calls in a response as an engine's parser reads them: from its text with special tokens, without the token that ended it,
    and up to the stop text if one did.

    Raises:
        TrajectoryRejected: there is no engine, or it failed. The episode ends with this reason, even if the environment catches it.
    """
    ended = response.finish == "stop" and not tokenizer.decode(response.tokens[-1:])
    text = tokenizer.decode_all(response.tokens[:-1] if ended else response.tokens)
    if response.stopped_by is not None:
        text = text.partition(response.stopped_by)[0]
    try:
        if agent.parse is None:
            raise TrajectoryRejected(ERROR, f"environment.tools.style={style} needs an engine, and there is none")
        return await agent.parse(text, style, schemas)
    except TrajectoryRejected as rejected:
        agent.failure = agent.failure or rejected
        raise


def parsed(calls: Sequence[ParsedCall]) -> tuple[Call | Malformed, ...]:
    """Return the calls that an engine's parser found, at most `MAX_CALLS`; they have no place in the response."""
    found: list[Call | Malformed] = []
    for call in calls[:MAX_CALLS]:
        if len(call.parameters) > MAX_CHARACTERS:
            found.append(Malformed(0, 0, f"error: a call of {len(call.parameters)} characters, more than {MAX_CHARACTERS}"))
        else:
            found.append(_hermes(f'{{"name": {json.dumps(call.name)}, "arguments": {call.parameters or "{}"}}}', 0, 0))
    return tuple(found)


def _brackets(inner: str, start: int, end: int) -> Call | Malformed:
    if "\n" in inner or "[" in inner or not inner.strip():
        return Malformed(start, end, "error: a call is [name: argument] or [argument], on one line, without brackets inside")
    named = _NAMED.fullmatch(inner)
    name, argument = (named[1], named[2].strip()) if named else (None, inner.strip())
    return Call(start, end, name, argument, argument)


def _hermes(inner: str, start: int, end: int) -> Call | Malformed:
    try:
        call = strict_json.read(inner)
    except ValueError as error:
        return Malformed(start, end, f"error: a call that is not valid JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(call.get("arguments"), dict):
        return Malformed(start, end, 'error: a call is {"name": text, "arguments": object}')
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    values = list(call["arguments"].values())
    argument = values[0] if len(values) == 1 and isinstance(values[0], str) else arguments
    return Call(start, end, call["name"], argument, arguments)
