"""Messages into tokens, so that what a policy sampled is never tokenised again.

A request of the chat API carries the whole conversation as text. Where it continues one that was answered here, the tokens of that one,
given and sampled, stand as they are, and only what follows the last answer is tokenised. It continues one when
- its messages begin with those of the conversation, the answers as they were given included; and
- the chat template renders it, and its tools, to text that begins with what the conversation was rendered to, the last answer included.
  A template that rewrites history (strips white space, drops thoughts) does not, and nothing sampled can be reused: another
  conversation begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = Mapping[str, Any]


class Renderer(Protocol):
    """What is needed of a tokenizer."""

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        """The conversation by the chat template, up to where the assistant is about to speak."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text; special tokens leave none."""
        ...


@dataclass(frozen=True)
class PolicyRequest:
    """What a request says to the policy.

    Attributes:
        messages: as the client knows them, in `protocol`'s normal form.
        rendered: the same as the template takes them.
        tools: OpenAI's function schemas.
    """

    messages: tuple[Message, ...]
    rendered: tuple[Message, ...]
    tools: tuple[Message, ...] = ()


@dataclass(frozen=True)
class NewContent:
    """What is new to the policy in a request.

    Attributes:
        asked: the request; what the policy wrote before is in `rendered` as it wrote it.
        text: all of it, rendered.
        tokens: those the policy has not seen.
    """

    asked: PolicyRequest
    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Conversation:
    """An answered request.

    Attributes:
        asked: with the answer as the last message.
        text: rendered, up to and including the answer's text.
        ended: the special token that ended the answer, which templates write too; None where it was cut, or has text of its own.
    """

    asked: PolicyRequest
    text: str
    ended: int | None


def begin(asked: PolicyRequest, renderer: Renderer) -> NewContent:
    """The first request of a conversation."""
    text = renderer.render(asked.rendered, asked.tools)
    return NewContent(asked, text, renderer.encode(text))


def extend(known: Conversation, asked: PolicyRequest, renderer: Renderer) -> NewContent | None:
    """What `asked` adds to a conversation, or None when it is not a continuation of it."""
    size = len(known.asked.messages)
    if len(asked.messages) <= size or asked.messages[:size] != known.asked.messages:
        return None
    rendered = (*known.asked.rendered, *asked.rendered[size:])
    text = renderer.render(rendered, asked.tools)
    if not text.startswith(known.text):
        return None
    tokens = renderer.encode(text[len(known.text) :])
    if known.ended is not None and tokens[:1] == (known.ended,):
        tokens = tokens[1:]
    return NewContent(PolicyRequest(asked.messages, rendered, asked.tools), text, tokens)


def answered(given: NewContent, message: Message, tokens: Sequence[int], finish: str, renderer: Renderer) -> Conversation:
    """The conversation after an answer.

    Args:
        message: the answer as the client gets it.
        tokens: as it was sampled.
        finish: "stop" or "length".
    """
    text = renderer.decode(tokens)
    rendered = (*given.asked.rendered, {"role": "assistant", "content": text})
    ended = tokens[-1] if finish == "stop" and renderer.decode(tokens[-1:]) == "" else None
    return Conversation(PolicyRequest((*given.asked.messages, message), rendered, given.asked.tools), given.text + text, ended)
