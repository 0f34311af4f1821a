"""What the policy says as clients get it: text without tool calls and stop texts."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence

from asyncmoe.engines.types import ParsedCall
from asyncmoe.rollout.episodes.openai_endpoint.conversation import Message
from asyncmoe.rollout.episodes.tools.calls import CLOSE, HERMES, OPEN, Call, find, parsed, written_id
from asyncmoe.rollout.tokenizer import Tokenizer

_MISTRAL_ID = 9
Answer = tuple[str, tuple[Mapping[str, str], ...]]
"""Text and calls, as `Completion` has them."""


def split(text: str, calls: bool, opening: str = "") -> Answer:
    """Return a response's text and its "hermes" tool calls, which are taken out of the text if `calls` is true.

    Args:
        opening: as for `find`.
    """
    found = [call for call in find(text, HERMES, opening) if not call.wrong] if calls else []
    if not found:
        return text, ()
    starts, ends = [call.start for call in found], [call.end for call in found]
    rest = "".join(text[a:b] for a, b in zip([0, *ends], [*starts, len(text)], strict=True)).rstrip()
    return rest, _named(found, HERMES, 0)


def split_by_engine(text: str, read: Sequence[ParsedCall], style: str, before: int, tokenizer: Tokenizer) -> Answer:
    """Return a response's text without its tool calls, and the calls as an engine's parser read them. Without a valid call, all of the text
    is the client's.

    Args:
        text: of the response, without special tokens.
        before: number of calls in the conversation before it.
    """
    found = [call for call in parsed(read) if not call.wrong]
    if not found:
        return text, ()
    rest = read[0].rest.rstrip()
    if rest not in text:
        # The parser read special tokens too, and may leave some.
        rest = tokenizer.decode(tokenizer.encode(rest))
    return rest, _named(found, style, before)


def _named(found: Sequence[Call], style: str, before: int) -> tuple[Mapping[str, str], ...]:
    """Give each call an id that the chat templates of its family accept; Mistral's take nine letters or digits only."""
    made = []
    for number, call in enumerate(found, before):
        chance = secrets.token_hex(_MISTRAL_ID)[:_MISTRAL_ID] if style == "mistral" else f"call_{secrets.token_hex(12)}"
        name = str(call.name)
        made.append({"id": written_id(style, name, number) or chance, "name": name, "arguments": call.arguments})
    return tuple(made)


def in_text(message: Message) -> Message:
    """Return a message with its calls in its text as the policy writes them, for a template that leaves calls out."""
    calls = [f"{OPEN}{json.dumps(call['function'], ensure_ascii=False)}{CLOSE}" for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": (), "content": "\n".join(filter(None, [message["content"], *calls]))} if calls else message
