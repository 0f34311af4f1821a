"""Find tool calls in a model's response.

Two styles:

- `hermes`: `<tool_call>{"name": "calculator", "arguments": {"expression": "12+7"}}</tool_call>`, as Qwen and Hermes models are trained to.
- `brackets`: `[calculator: 12+7]`, or `[12+7]` for the first tool. For models so small that every token counts. An argument cannot contain
  "]" or a newline; ordinary text in brackets is read as a call.

Text within a thought is not a call, in these styles and in those that an engine reads. An unclosed thought ends with the response; a
thought begins before the response if the prompt ends with its opening, as with some chat templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncmoe.engines.types import ParsedCall
from asyncmoe.rollout.episodes.environment import ERROR, Agent, Response
from asyncmoe.rollout.episodes.tools.tool import read_json
from asyncmoe.rollout.tokenizer import Tokenizer

HERMES, BRACKETS = STYLES = ("hermes", "brackets")
"""The styles that `find` reads; any other name is a parser of the engine."""
MAX_CALLS = 16
"""Maximum number of calls in one response; the rest of the response is ignored."""

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_THINK = r"(?:<(?:\w+[:|])?think(?:_\w+)?>|\[THINK\]|◁think▷|<\|START_THINKING\|>)"
_THOUGHT = r"(?:</(?:\w+[:|])?think(?:_\w+)?>|\[/THINK\]|◁/think▷|<\|END_THINKING\|>)"
"""The beginning and the end of a thought (sglang 0.5.23, srt/parser/reasoning_parser.py)."""
_THOUGHTS = rf"{_THINK}.*?(?:{_THOUGHT}|\Z)"
_ENDS = {HERMES: (OPEN, CLOSE), BRACKETS: ("[", "]")}
_PARTS = {
    style: re.compile(rf"{_THOUGHTS}|(?P<ended>{_THOUGHT})|{re.escape(begin)}(?P<inner>.*?)(?P<end>{re.escape(end)}|\Z)", re.DOTALL)
    for style, (begin, end) in _ENDS.items()
}
_NAMED = re.compile(r"([A-Za-z_][A-Za-z0-9_./-]*)[ \t]*:(.*)", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        name: name of the tool, or None for the first tool. The caller checks that the tool exists.
        arguments: the arguments as JSON text; in style `brackets`, as written.
        wrong: why text that looks like a call is not one, for the model; "" if it is.
        start, end: range of its characters in the response, if `find` found it.
    """

    name: str | None = None
    arguments: str = ""
    wrong: str = ""
    start: int = 0
    end: int = 0


def written_id(style: str, name: str, number: int) -> str | None:
    """Return the id of a call if policies of a style write it themselves and their chat templates repeat it with the tool's answer: Kimi's
    consists of the function's name and the number of the call in the conversation (sglang 0.5.23, srt/entrypoints/openai/serving_chat.py
    `_process_tool_call_id`). None: the template omits ids."""
    return {"kimi_k2": f"functions.{name}:{number}", "kimi_k3": f"{name}:{number}"}.get(style)


def find(text: str, style: str, opening: str = "") -> tuple[Call, ...]:
    """Return the calls in a response in order, at most `MAX_CALLS`, in time linear in the response's length.

    Args:
        opening: as `opening` returns it.
    """
    found: list[Call] = []
    for part in _PARTS[style].finditer(opening + text):
        inner = part["inner"]
        if inner is None:  # a thought, or the end of one that began in the prompt
            found = [] if part["ended"] else found
            continue
        if not part["end"]:
            call = Call(wrong=f"error: {' without '.join(_ENDS[style])}")
        else:
            call = _hermes(inner) if style == HERMES else _brackets(inner)
        found.append(replace(call, start=part.start() - len(opening), end=part.end() - len(opening)))
    return tuple(found[:MAX_CALLS])


def opening(given: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the opening of a thought with which the given tokens end, so that the response begins inside the thought; else ""."""
    opened = re.search(rf"({_THINK})\s*\Z", tokenizer.decode_all(given[-16:]))  # more tokens than any opening has
    return opened[1] if opened is not None else ""


async def read_calls(
    agent: Agent, response: Response, style: str, schemas: Sequence[Mapping[str, Any]], text: str
) -> tuple[tuple[Call, ...], str]:
    """Return the calls in a response, and its text without the valid ones.

    Args:
        schemas: schemas of the tools, for the parser of an engine.
        text: text of the response, up to the stop text if one ended it.

    Raises:
        TrajectoryRejected: there is no engine, or it failed. The episode ends with this reason, even if the environment catches it.
    """
    if style in STYLES:
        found = find(text, style, opening(response.turns[0].given, agent.episode.tokenizer))
        valid = [call for call in found if not call.wrong]
        starts, ends = [call.start for call in valid], [call.end for call in valid]
        rest = "".join(text[a:b] for a, b in zip([0, *ends], [*starts, len(text)], strict=True))
    else:
        parsed = await _parsed(agent, response, style, schemas)
        calls = [f'{{"name": {json.dumps(call.name)}, "arguments": {call.parameters or "{}"}}}' for call in parsed[:MAX_CALLS]]
        found = tuple(replace(_hermes(call), name=one.name) for call, one in zip(calls, parsed, strict=False))
        valid, rest = [call for call in found if not call.wrong], parsed[0].rest if parsed else text
        if rest.rstrip() not in text:  # the parser read special tokens too, and may leave some
            rest = agent.episode.tokenizer.decode(agent.episode.tokenizer.encode(rest))
    return found, rest.rstrip() if valid else text


async def _parsed(agent: Agent, response: Response, style: str, schemas: Sequence[Mapping[str, Any]]) -> Sequence[ParsedCall]:
    """Return the calls in a response as an engine's parser reads them: from its text with special tokens, up to the token or stop text that
    ended it, and without thoughts. Raises as `read_calls`."""
    parse, tokenizer = agent.episode.parse, agent.episode.tokenizer
    ended = response.finish == "stop" and not tokenizer.decode(response.tokens[-1:])
    text = tokenizer.decode_all(response.tokens[:-1] if ended else response.tokens)
    if response.stopped_by is not None:
        text = text.partition(response.stopped_by)[0]
    aloud = re.sub(rf"\A\s*(?:{_THOUGHTS}\s*)*", "", opening(response.turns[0].given, tokenizer) + text, flags=re.DOTALL)
    if not aloud:
        return ()
    if parse is None:
        raise agent.episode.failed(ERROR, f"environment.tools.style={style} needs an engine, and there is none")
    with agent.episode.noting():
        found = await parse(aloud, style, schemas)
        if (more := re.search(_THINK, aloud)) is not None and not any(more[0] in call.parameters for call in found):
            # Not an argument of a call: another thought.
            found = await parse(re.sub(_THOUGHTS, "", aloud, flags=re.DOTALL), style, schemas)
    return [ParsedCall(call.name, call.parameters, text[: len(text) - len(aloud)] + call.rest) for call in found]


def _brackets(inner: str) -> Call:
    if "\n" in inner or "[" in inner or not inner.strip():
        return Call(wrong="error: a call is [name: argument] or [argument], on one line, without brackets inside")
    named = _NAMED.fullmatch(inner)
    return Call(named[1], named[2].strip()) if named else Call(None, inner.strip())


def _hermes(inner: str) -> Call:
    try:
        call = read_json(inner)
    except ValueError as error:
        return Call(wrong=f"error: a call that is not valid JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(call.get("arguments"), dict):
        return Call(wrong='error: a call is {"name": text, "arguments": object}')
    return Call(call["name"], json.dumps(call["arguments"], ensure_ascii=False))
