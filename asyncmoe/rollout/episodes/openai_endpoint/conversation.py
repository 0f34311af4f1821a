"""Turns messages into tokens without ever tokenizing sampled tokens again.

A request of the chat API carries the whole conversation as text. If it continues a conversation that was answered here, the given and
sampled tokens of that conversation stay as they are, and only the text after the last answer is tokenized. A request continues a
conversation if
- its messages begin with the conversation's messages, including the answers exactly as returned; and
- the chat template renders its messages and tools to text that begins with the conversation's rendered text, including the last answer.
  With a template that rewrites history (strips white space, drops thoughts), this fails and the tokens of that answer cannot be reused;
  those of earlier answers may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = Mapping[str, Any]


class Renderer(Protocol):
    """The part of a tokenizer used here."""

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        """Render the conversation with the chat template, up to the start of the assistant's next message."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        ...


@dataclass(frozen=True)
class PolicyRequest:
    """The content of a request that the policy sees.

    Attributes:
        messages: the client's messages, in `protocol`'s normal form.
        rendered: the same messages in the form the chat template accepts.
        tools: OpenAI's function schemas.
    """

    messages: tuple[Message, ...]
    rendered: tuple[Message, ...]
    tools: tuple[Message, ...] = ()


@dataclass(frozen=True)
class NewContent:
    """The content of a request that is new to the policy.

    Attributes:
        asked: the request; its `rendered` has the policy's earlier answers exactly as sampled.
        text: the whole request, rendered.
        tokens: the tokens that the policy has not seen.
    """

    asked: PolicyRequest
    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Conversation:
    """An answered request.

    Attributes:
        asked: the request, with the answer as the last message.
        text: the rendered text, up to and including the answer's text.
        ended: the special token that ended the answer, which templates also write; None if the answer was cut off or its last token has
            text of its own.
    """

    asked: PolicyRequest
    text: str
    ended: int | None


def begin(asked: PolicyRequest, renderer: Renderer) -> NewContent:
    """Render and tokenize the first request of a conversation."""
    text = renderer.render(asked.rendered, asked.tools)
    return NewContent(asked, text, renderer.encode(text))


def extend(known: Conversation, asked: PolicyRequest, renderer: Renderer) -> NewContent | None:
    """Return the content that `asked` adds to a conversation, or None if it does not continue the conversation."""
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
    """Return the conversation after an answer.

    Args:
        message: the answer as the client receives it.
        tokens: the sampled tokens of the answer.
        finish: "stop" or "length".
    """
    text = renderer.decode(tokens)
    rendered = (*given.asked.rendered, {"role": "assistant", "content": text})
    ended = tokens[-1] if finish == "stop" and renderer.decode(tokens[-1:]) == "" else None
    return Conversation(PolicyRequest((*given.asked.messages, message), rendered, given.asked.tools), given.text + text, ended)
