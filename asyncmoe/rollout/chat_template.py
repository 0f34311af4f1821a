"""Find out what a chat template leaves out.

A template silently drops what it does not know: a role, an assistant's calls, tools. Each kind of content is rendered alone, once, with a
mark in its place; everything around it has a form that most templates accept, such as ids of nine characters for Mistral's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from asyncmoe.errors import DataError

_MARK = "zqxvkj"
"""Letters only, so that no template changes them."""
CALL_ID = "call00000"
"""Id of an invented call."""
_KEYS = ("tool_calls", "reasoning_content", "content beside tool_calls")


class CallArguments(dict[str, Any]):
    """The arguments of a call: an object, as most templates want. DeepSeek's template can also append it to a string."""

    def __radd__(self, text: str) -> str:
        return text + json.dumps(self, ensure_ascii=False)


def names(template: str | Mapping[str, str] | None) -> set[str]:
    """Return the names in the code of one or several templates, their variables included, except those that every request defines."""
    from jinja2 import Environment

    source = "".join(template.values()) if isinstance(template, Mapping) else template or ""
    return {word for _, kind, word in Environment().lex(source) if kind == "name"} - {"messages", "tools", "add_generation_prompt"}


def kinds(message: Mapping[str, Any], first: bool) -> list[str]:
    """Return the kinds of content in a message that a template may leave out.

    Args:
        first: the message begins its conversation.
    """
    role = message["role"]
    if role == "assistant":
        return [kind for kind in _KEYS[: 3 if message.get("tool_calls") else 2] if message.get(kind.split()[0])]
    return [f"a message of the role {role}{' at the beginning' if first else ''}"] if role != "user" and message.get("content") else []


@lru_cache(256)
def lacks(kind: str, template: str, render: Callable[..., str]) -> bool:
    """Return whether a template leaves out a kind of content.

    Args:
        kind: one of `kinds`, "tools", or "name" of a message.
        template: its text, as a key of the cache.
        render: `Tokenizer.render` with it.
    """
    try:
        return _MARK not in render(*_trial(kind))
    except DataError:
        return False  # a template that refuses it raises its own error


def _trial(kind: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return messages and tools in which only content of this kind has the mark."""
    asked, key = {"role": "user", "content": "?"}, kind.split()[0]
    tool = {"type": "function", "function": {"name": _MARK, "description": "?", "parameters": {"type": "object"}}}
    if kind in ("tools", "name"):
        return [{**asked, "name": _MARK} if kind == "name" else asked], [tool] if kind == "tools" else []
    function = {"name": "f", "arguments": CallArguments(x=_MARK if kind == "tool_calls" else "?")}
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": CALL_ID, "type": "function", "function": function}]}
    told = {"role": "tool", "content": "?", "tool_call_id": CALL_ID}
    if kind in _KEYS:
        return [asked, called if kind == "tool_calls" else {**called, key: _MARK}, told], []
    said = {**told, "role": kind.split()[5], "content": _MARK}
    if said["role"] == "tool":
        return [asked, called, said], []
    return [*([] if kind.endswith("beginning") else [asked, {"role": "assistant", "content": "!"}]), said, asked], []
