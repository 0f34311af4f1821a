"""Encode examples: system prompt, chat template, and the checks that need the tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, cast

from asyncmoe import plugins
from asyncmoe.errors import DataError
from asyncmoe.rollout.tasks.types import Demonstration, Endless, Example, Finite, Message, Prompt
from asyncmoe.rollout.tokenizer import Tokenizer


class Encoder:
    """Turns examples into prompts and demonstrations.

    Args:
        chat: apply the tokenizer's chat template to a prompt of text; a prompt of messages always needs it.
        system: message put before every conversation that does not begin with a system message.
        ending: text after a prompt of text if `chat` is false.
    """

    def __init__(self, tokenizer: Tokenizer, *, chat: bool, system: str | None = None, ending: str = "") -> None:
        self._tokenizer, self._chat, self._system, self._ending = tokenizer, chat, system, ending

    def prompt(self, example: Example) -> Prompt:
        """Return the prompt of a checked example.

        Raises:
            DataError: the tokenizer has no chat template, the template cannot render the messages or leaves some of them
                out, or a token is outside the vocabulary.
        """
        where = example.where
        if is_tokens(example.prompt):
            tokens = tuple(cast(Sequence[int], example.prompt))
            outside = [token for token in tokens if not 0 <= token < self._tokenizer.vocabulary]
            if outside:
                raise DataError(f"{where}, prompt", got=f"token {outside[0]}", expected=f"ids below {self._tokenizer.vocabulary}")
            return Prompt(self._tokenizer.decode(tokens), tokens, example.answer, example.columns, where=where)
        if isinstance(example.prompt, str) and not self._chat:
            text = example.prompt
            return Prompt(text, self._tokenizer.encode(text + self._ending), example.answer, example.columns, where=where)
        messages = self._messages(example.prompt)
        self._tokenizer.check(messages, where=f"{where}, prompt")
        tokens = self._tokenizer.encode(self._tokenizer.render(messages))
        return Prompt(str(messages[-1]["content"]), tokens, example.answer, example.columns, messages, where)

    def demonstration(self, example: Example) -> Demonstration:
        """Return the example with its solution and the end-of-sequence token. Raises as `prompt`, and DataError without a solution."""
        solution = example.answer if example.solution is None else example.solution
        if not solution:
            hint = "name the column in task.columns.answer, return an Example with a solution, or set warmup.steps=0"
            raise DataError(example.where, got="neither solution nor answer", expected="text that the warm-up can imitate", hint=hint)
        prompt = self.prompt(example)
        return Demonstration(prompt.tokens, (*self._tokenizer.encode(solution), self._tokenizer.eos), prompt.where)

    def _messages(self, prompt: str | Sequence[Message] | Sequence[int]) -> tuple[Message, ...]:
        said = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(cast(Sequence[Message], prompt))
        if self._system is None or said[0]["role"] == "system":
            return said
        return ({"role": "system", "content": self._system}, *said)


def example_at(source: Finite, index: int, name: str) -> Example:
    """Return a checked example, named after its source and index unless it has a name. Raises DataError as `check` does, or for an error of
    a user's code."""
    where = f"{name}, example {index}"
    example = plugins.called(lambda: source[index], where)
    check(example, where)
    return example if example.where else replace(example, where=where)


def drawn(source: Endless, random: Random, where: str) -> Example:
    """Return the next example of an endless source; otherwise like `example_at`."""
    example = plugins.called(lambda: source.draw(random), where)
    check(example, where)
    return replace(example, where=where)


def is_tokens(prompt: object) -> bool:
    """Return whether a prompt is a sequence of token ids."""
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], int)


def check(example: object, where: str) -> None:
    """Check an example without a tokenizer.

    Raises:
        DataError: not an `Example`; an empty prompt, or one that is neither text nor messages nor token ids; an answer or a solution that
            is not text; columns that JSON cannot hold.
    """
    if not isinstance(example, Example):
        raise DataError(where, got=f"{type(example).__name__} {str(example)[:100]!r}", expected="an asyncmoe.rollout.tasks.Example")
    check_prompt(example.prompt, f"{where}, prompt")
    for name, text in (("answer", example.answer), ("solution", "" if example.solution is None else example.solution)):
        if not isinstance(text, str):
            raise DataError(f"{where}, {name}", got=repr(text)[:100], expected="text")
        check_json(text, f"{where}, {name}")
    check_columns(example.columns, where)


def check_prompt(prompt: object, where: str) -> None:
    """Refuse a prompt that is neither non-blank text, nor messages, nor token ids; raises DataError."""
    expected = 'text, messages ([{"role": ..., "content": ...}, ...]) or token ids'
    if isinstance(prompt, str) and prompt.strip():
        check_json(prompt, where)
        return
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
        raise DataError(where, got=repr(prompt)[:100], expected=f"{expected}, not empty")
    if all(isinstance(one, int) and not isinstance(one, bool) for one in prompt):
        return
    for one in prompt:
        if not (isinstance(one, Mapping) and isinstance(one.get("role"), str) and _said(one)):
            raise DataError(where, got=repr(one)[:100], expected=expected)
        check_json(dict(one), where)
    if prompt[-1]["role"] == "assistant" or not prompt[-1]["content"].strip():
        got = "an empty last message" if prompt[-1]["role"] != "assistant" else "a last message of the assistant"
        raise DataError(where, got=got, expected="a last message that asks the assistant something")


def _said(message: Message) -> bool:
    content = message.get("content")
    only_calls = content is None and message["role"] == "assistant"
    return only_calls or isinstance(content, str)


def check_columns(columns: object, where: str) -> None:
    """Refuse columns that JSON cannot hold; raises DataError."""
    if not isinstance(columns, Mapping):
        raise DataError(f"{where}, columns", got=type(columns).__name__, expected="a mapping from names to values")
    for name, value in columns.items():
        check_json(value, f"{where}, column {name}", "leave it out of task.columns.keep, or convert it")


def check_json(value: object, where: str, hint: str | None = None) -> None:
    """Refuse values that JSON in UTF-8 cannot hold, such as NaN and a lone surrogate; raises DataError."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(where, got=str(error), expected="JSON in UTF-8", hint=hint) from error


def identity(prompt: str | Sequence[Message] | Sequence[Any]) -> bytes:
    """Return a digest that is equal for prompts that differ only in white space and system messages."""
    if isinstance(prompt, str):
        said: object = [" ".join(prompt.split())]
    elif is_tokens(prompt):
        said = list(prompt)
    else:
        messages = cast(Sequence[Message], prompt)
        said = [" ".join(str(one["content"]).split()) for one in messages if one["role"] != "system"]
    return hashlib.blake2b(json.dumps(said).encode(), digest_size=16).digest()
