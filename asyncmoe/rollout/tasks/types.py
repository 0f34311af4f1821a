"""Questions of a task: the interface of their sources, and the form in which the rest of the run receives them.

A source is a task's content and knows no tokenizer. It is one of
- `Finite`: it has a length, and an example for each index; the run visits all examples once in an epoch, in an order the seed determines;
- `Endless`: it draws an example from a random generator, which the run seeds with `run.seed` and the number of the prompt.

Either way prompt n is the same in every run with the same seed, so a resumed run needs only the number of its next prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol, runtime_checkable

import msgspec

from asyncmoe.rpc.codec import parsed

Message = Mapping[str, Any]
"""One message of a conversation: "role", "content", and any other key that the chat template knows."""


@dataclass(frozen=True)
class Example:
    """One question as a source states it.

    Attributes:
        prompt: text, which becomes the user's message if `task.chat_template` is true; or messages, for the chat template; or token ids,
            which the policy sees unchanged.
        answer: reference answer, for scorers and environments.
        columns: other values that scorers and environments need; JSON must be able to hold them.
        solution: text that a warm-up imitates; None: the answer.
        where: its name, for messages: file and line, or data set and row; empty: its source and index.
    """

    prompt: str | Sequence[Message] | Sequence[int]
    answer: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    solution: str | None = None
    where: str = field(default="", compare=False)


class Finite(Protocol):
    """A source with a length. It must return equal examples for equal indices, in every process and every run."""

    def __len__(self) -> int:
        """Return the number of examples; at least 1, and the same during the whole run."""

    def __getitem__(self, index: int) -> Example:
        """Return the example of an index, 0 <= index < len. Must not wait: all episodes share the event loop it runs in."""


class Endless(Protocol):
    """An endless source."""

    def draw(self, random: Random) -> Example:
        """Return an example that depends on the draws from `random` only. Must not wait."""


@dataclass(frozen=True)
class Prompt:
    """One question. The engine receives `tokens`.

    Attributes:
        text: the question as text, without the chat template; of a conversation, its last message.
        tokens: the whole prompt, chat template included.
        answer: the reference answer.
        columns: the example's other columns.
        messages: the conversation, with the system prompt; empty if the prompt is not a conversation.
        where: name of the example, for messages.
    """

    text: str
    tokens: tuple[int, ...]
    answer: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    where: str = field(default="", compare=False)


def to_bytes(prompt: Prompt) -> bytes:
    """Encode a prompt for another process: in JSON, like columns, because msgpack has no integers above 64 bits and no NumPy numbers."""
    return json.dumps(vars(prompt), default=dict).encode()


def from_bytes(sent: bytes) -> Prompt:
    """Decode the result of `to_bytes`. Raises ProtocolError."""
    return parsed(lambda: msgspec.convert(json.loads(sent), Prompt), "prompt")


@dataclass(frozen=True)
class Demonstration:
    """A solved question.

    Attributes:
        given: tokens of the prompt.
        said: tokens of the solution, including the end-of-sequence token.
        where: name of the example, for messages.
    """

    given: tuple[int, ...]
    said: tuple[int, ...]
    where: str = field(default="", compare=False)


@runtime_checkable
class HasGolds(Protocol):
    """A task whose reference answers are known before the run, so that they can be checked before engines start."""

    def golds(self) -> Iterable[Example]:
        """Return all questions that have a reference answer, with their names, in the order of the file."""


class Task(Protocol):
    """An endless sequence of prompts for each stream, in tokens."""

    def prompt(self, group: int, stream: str = "prompt") -> Prompt:
        """Return the question of all members of group `group`. Each stream has its own questions for the same numbers.

        Raises:
            DataError: the example cannot be used, or the user's own source raised.
        """

    def demonstration(self, index: int) -> Demonstration:
        """Return the `index`-th solved question. Raises as `prompt`."""
