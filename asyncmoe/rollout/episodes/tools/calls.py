"""Finds tool calls in a model's response.

Two styles:

- `hermes`: `<tool_call>{"name": "calculator", "arguments": {"expression": "12+7"}}</tool_call>`, as Qwen and Hermes models are trained to.
- `brackets`: `[calculator: 12+7]`, or `[12+7]` for the first tool. For models so small that every token counts. An argument cannot contain
  "]" or a newline; ordinary text in brackets is read as a call.

What a model writes while it thinks is no call, in these styles and in those that an engine reads. A thought ends with the response if
nothing else ends it, and begins before the response if the prompt ends with its opening, as some chat templates write it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from asyncmoe.engines.types import ParsedCall
from asyncmoe.errors import AsyncmoeError, TrajectoryRejected
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
_THINK = r"(?:<(?:\w+[:|])?think(?:_\w+)?>|\[THINK\]|◁think▷|<\|START_THINKING\|>)"
_THOUGHT = r"(?:</(?:\w+[:|])?think(?:_\w+)?>|\[/THINK\]|◁/think▷|<\|END_THINKING\|>)"
"""The beginning and the end of a thought (sglang 0.5.23, srt/parser/reasoning_parser.py)."""
_THOUGHTS = rf"{_THINK}.*?(?:{_THOUGHT}|\Z)"
_ENDS: Mapping[Style, tuple[str, str]] = {"hermes": (OPEN, CLOSE), "brackets": ("[", "]")}
_PARTS = {
    style: re.compile(rf"{_THOUGHTS}|(?P<ended>{_THOUGHT})|{re.escape(begin)}(?P<inner>.*?)(?P<end>{re.escape(end)}|\Z)", re.DOTALL)
    for style, (begin, end) in _ENDS.items()
}
_NAMED = re.compile(r"([A-Za-z_][A-Za-z0-9_./-]*)[ \t]*:(.*)", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        start, end: range of its characters in the response.
        name: name of the tool, or None for the first tool. The caller checks that the tool exists.
        arguments: the arguments as JSON text; in brackets, as written.
    """

    start: int
    end: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class Malformed:
    """Text that looks like a call but is invalid. `why` explains the error to the model; `name` is None if it is not known."""

    start: int
    end: int
    why: str
    name: str | None = None


def written_id(style: str, name: str, number: int) -> str | None:
    """Return the id of a call if policies of a style write it themselves, and their chat templates show it again with the tool's answer:
    Kimi's name the function and the number of the call in the conversation (sglang 0.5.23, srt/entrypoints/openai/serving_chat.py
    `_process_tool_call_id`). None: the template leaves ids out."""
    return {"kimi_k2": f"functions.{name}:{number}", "kimi_k3": f"{name}:{number}"}.get(style)


def find(text: str, style: Style, opening: str = "") -> tuple[Call | Malformed, ...]:
    """Return the calls in a response in order, at most `MAX_CALLS`, in time linear in the response's length.

    Args:
        opening: as `opening` returns it.
    """
    found: list[Call | Malformed] = []
    for part in _PARTS[style].finditer(opening + text):
        start, after, inner = part.start() - len(opening), part.end() - len(opening), part["inner"]
        if inner is None:  # a thought, or the end of one that the prompt has begun
            found = [] if part["ended"] else found
        elif len(found) == MAX_CALLS:
            break
        elif not part["end"]:
            found.append(Malformed(start, after, f"error: {' without '.join(_ENDS[style])}"))
        elif len(inner) > MAX_CHARACTERS:
            found.append(Malformed(start, after, f"error: a call of {len(inner)} characters, more than {MAX_CHARACTERS}"))
        else:
            found.append(_hermes(inner, start, after) if style == "hermes" else _brackets(inner, start, after))
    return tuple(found)


def opening(given: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the opening of the thought that a response begins in, because the tokens given before it end with one; else ""."""
    opened = re.search(rf"({_THINK})\s*\Z", tokenizer.decode_all(given[-16:]))  # more tokens than any opening has
    return opened[1] if opened is not None else ""


async def read_by_engine(
    agent: Agent, response: Response, style: str, schemas: Sequence[Mapping[str, Any]], tokenizer: Tokenizer
) -> Sequence[ParsedCall]:
    """Return the calls in a response as an engine's parser reads them: from its text with special tokens, without the token that ended it,
    up to the stop text if one did, and without thoughts.

    Raises:
        TrajectoryRejected: there is no engine, or it failed. The episode ends with this reason, even if the environment catches it.
    """
    ended = response.finish == "stop" and not tokenizer.decode(response.tokens[-1:])
    text = tokenizer.decode_all(response.tokens[:-1] if ended else response.tokens)
    if response.stopped_by is not None:
        text = text.partition(response.stopped_by)[0]
    aloud = re.sub(rf"\A\s*(?:{_THOUGHTS}\s*)*", "", opening(response.turns[0].given, tokenizer) + text, flags=re.DOTALL)
    if not aloud:
        return ()
    try:
        if agent.parse is None:
            raise TrajectoryRejected(ERROR, f"environment.tools.style={style} needs an engine, and there is none")
        read = await agent.parse(aloud, style, schemas)
        if (more := re.search(_THINK, aloud)) is not None and not any(more[0] in call.parameters for call in read):
            # Not an argument of a call: another thought.
            read = await agent.parse(re.sub(_THOUGHTS, "", aloud, flags=re.DOTALL), style, schemas)
    except AsyncmoeError as error:
        agent.failure = agent.failure or error
        raise
    return [ParsedCall(call.name, call.parameters, text[: len(text) - len(aloud)] + call.rest) for call in read]


def parsed(calls: Sequence[ParsedCall]) -> tuple[Call | Malformed, ...]:
    """Return the calls that an engine's parser found, at most `MAX_CALLS`; they have no place in the response."""
    found: list[Call | Malformed] = []
    for call in calls[:MAX_CALLS]:
        if len(call.parameters) > MAX_CHARACTERS:
            found.append(Malformed(0, 0, f"error: a call of {len(call.parameters)} characters, more than {MAX_CHARACTERS}", call.name))
        else:
            read = _hermes(f'{{"name": {json.dumps(call.name)}, "arguments": {call.parameters or "{}"}}}', 0, 0)
            found.append(replace(read, name=call.name))
    return tuple(found)


def _brackets(inner: str, start: int, end: int) -> Call | Malformed:
    if "\n" in inner or "[" in inner or not inner.strip():
        return Malformed(start, end, "error: a call is [name: argument] or [argument], on one line, without brackets inside")
    named = _NAMED.fullmatch(inner)
    name, argument = (named[1], named[2].strip()) if named else (None, inner.strip())
    return Call(start, end, name, argument)


def _hermes(inner: str, start: int, end: int) -> Call | Malformed:
    try:
        call = strict_json.read(inner)
    except ValueError as error:
        return Malformed(start, end, f"error: a call that is not valid JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(call.get("arguments"), dict):
        return Malformed(start, end, 'error: a call is {"name": text, "arguments": object}')
    return Call(start, end, call["name"], json.dumps(call["arguments"], ensure_ascii=False))
