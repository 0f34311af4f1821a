"""Turn messages into tokens without ever tokenizing sampled text again.

A request of the chat API carries the whole conversation as text. If it continues a conversation that was answered here, the given and
sampled tokens of that conversation stay as they are, and only the text after the last answer is tokenized. A request continues a
conversation if
- its messages begin with the conversation's messages, including the answers exactly as returned; and
- the chat template renders its messages and tools to text that begins with the conversation's rendered text, including the last answer.
  If a template rewrites history (strips white space, drops thoughts), this fails: the tokens of the last answer cannot be reused; those
  of earlier answers may be.

An answer is rendered as its sampled text, calls included. Templates that require structured calls before results of tools (Mistral's)
refuse this; then only the text they write after such an answer is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncmoe.errors import DataError
from asyncmoe.rollout.tokenizer import Tokenizer

Message = Mapping[str, Any]


@dataclass(frozen=True)
class PolicyRequest:
    """The content of a request that the policy sees.

    Attributes:
        messages: the client's messages, in the normal form of `request`.
        rendered: the same messages in the form the chat template accepts.
        tools: OpenAI's function schemas.
        variables: variables of the chat template, in addition to the run's.
    """

    messages: tuple[Message, ...]
    rendered: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)


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


def begin(asked: PolicyRequest, tokenizer: Tokenizer) -> NewContent:
    """Render and tokenize the first request of a conversation.

    Raises:
        DataError: the template refuses the messages, or leaves some of them out. The functions below raise the same.
    """
    tokenizer.check(asked.rendered)
    text = tokenizer.render(asked.rendered, asked.tools, variables=asked.variables)
    return NewContent(asked, text, tokenizer.encode(text))


def extend(known: Conversation, asked: PolicyRequest, tokenizer: Tokenizer) -> NewContent | None:
    """Return the content that `asked` adds to a conversation, or None if it does not continue the conversation."""
    size = len(known.asked.messages)
    if len(asked.messages) <= size or asked.messages[:size] != known.asked.messages:
        return None
    tokenizer.check(asked.rendered[size:], size)
    rendered = (*known.asked.rendered, *asked.rendered[size:])
    try:
        text = tokenizer.render(rendered, asked.tools, variables=asked.variables)
    except DataError:
        return _results(known, asked, tokenizer)
    if not text.startswith(known.text):
        return None
    tokens = tokenizer.encode(text[len(known.text) :])
    if known.ended is not None and tokens[:1] == (known.ended,):
        tokens = tokens[1:]
    return NewContent(replace(asked, rendered=rendered), text, tokens)


def _results(known: Conversation, asked: PolicyRequest, tokenizer: Tokenizer) -> NewContent | None:
    """Return the tool results that `asked` adds to a conversation, as the template writes them after an answer with calls; None if it adds
    anything else, or the template does not end that answer as the policy did."""
    size = len(known.asked.messages)
    more, (said,) = asked.rendered[size:], asked.rendered[size - 1 : size]
    if known.ended is None or any(message["role"] != "tool" for message in more):
        return None
    called = ({"role": "user", "content": "?"}, said)
    before, whole = tokenizer.render(called, asked=False), tokenizer.render((*called, *more), variables=asked.variables)
    end = tokenizer.decode_all((known.ended,))
    if not whole.startswith(before) or end not in before:
        return None
    text = before.rpartition(end)[2] + whole[len(before) :]
    rendered = (*known.asked.rendered, *more)
    return NewContent(replace(asked, rendered=rendered), f"{known.text}{end}{text}", tokenizer.encode(text))


def answered(given: NewContent, message: Message, tokens: Sequence[int], finish: str, tokenizer: Tokenizer) -> Conversation:
    """Return the conversation after an answer.

    Args:
        message: the answer as the client receives it.
        tokens: the sampled tokens of the answer.
        finish: "stop" or "length".
    """
    text = tokenizer.decode(tokens)
    rendered = (*given.asked.rendered, {"role": "assistant", "content": text})
    ended = tokens[-1] if finish == "stop" and tokenizer.decode(tokens[-1:]) == "" else None
    return Conversation(replace(given.asked, messages=(*given.asked.messages, message), rendered=rendered), given.text + text, ended)
