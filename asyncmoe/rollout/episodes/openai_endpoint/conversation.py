"""Turns messages into tokens without ever tokenizing sampled tokens again.

A request of the chat API carries the whole conversation as text. If it continues a conversation that was answered here, the given and
sampled tokens of that conversation stay as they are, and only the text after the last answer is tokenized. A request continues a
conversation if
- its messages begin with the conversation's messages, including the answers exactly as returned; and
- the chat template renders its messages and tools to text that begins with the conversation's rendered text, including the last answer.
  With a template that rewrites history (strips white space, drops thoughts), this fails and the tokens of that answer cannot be reused;
  those of earlier answers may be.

An answer is rendered as the text that it was, calls included. Templates that want its calls as such before results of tools (Mistral's)
refuse this; then only what they write after such an answer is taken from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from asyncmoe.errors import DataError

Message = Mapping[str, Any]


class Renderer(Protocol):
    """The part of a tokenizer used here."""

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, asked: bool = True) -> str:
        """Render the conversation with the chat template, if `asked` up to the start of the assistant's next message.

        Raises:
            DataError: the template refuses the messages.
        """
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        ...

    def decode_all(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
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
    try:
        text = renderer.render(rendered, asked.tools)
    except DataError:
        return _results(known, asked, renderer)
    if not text.startswith(known.text):
        return None
    tokens = renderer.encode(text[len(known.text) :])
    if known.ended is not None and tokens[:1] == (known.ended,):
        tokens = tokens[1:]
    return NewContent(PolicyRequest(asked.messages, rendered, asked.tools), text, tokens)


def _results(known: Conversation, asked: PolicyRequest, renderer: Renderer) -> NewContent | None:
    """Return the results of tools that `asked` adds to a conversation, as the template writes them after an answer that called the tools;
    None if it adds anything else, or the template does not end that answer as the policy did."""
    size = len(known.asked.messages)
    more, (said,) = asked.rendered[size:], asked.rendered[size - 1 : size]
    if known.ended is None or any(message["role"] != "tool" for message in more):
        return None
    called = ({"role": "user", "content": "?"}, said)
    before, whole, end = renderer.render(called, asked=False), renderer.render((*called, *more)), renderer.decode_all((known.ended,))
    if not whole.startswith(before) or end not in before:
        return None
    text = before.rpartition(end)[2] + whole[len(before) :]
    rendered = PolicyRequest(asked.messages, (*known.asked.rendered, *more), asked.tools)
    return NewContent(rendered, f"{known.text}{end}{text}", renderer.encode(text))


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
