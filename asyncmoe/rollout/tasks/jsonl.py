"""Questions from a file in GSM8K's format: one {"question": ..., "answer": "reasoning #### 42"} per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from asyncmoe.errors import DataError
from asyncmoe.rollout.tasks.types import Demonstration, Gold, Prompt, demonstrate
from asyncmoe.rollout.tokenizer import Tokenizer

MARK = "####"
"""Separates the reasoning from the reference answer."""


@dataclass(frozen=True)
class JsonLine:
    """One line of the file."""

    question: str
    solution: str
    """The whole "answer": reasoning and reference."""
    reference: str
    """The text after the last `MARK`, or the whole "answer" without a mark, as written: scorers decide what a comma means."""
    where: str = ""
    """File and line, for messages."""


class JsonlTask:
    """The lines of a file; each epoch visits every line once, in its own order drawn from the seed.

    Args:
        chat_template: apply the tokenizer's chat template to the question; otherwise append a line break.
        key: configuration key that names the file.

    Raises:
        DataError: see `read`; or the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer, path: Path, chat_template: bool, seed: int, key: str = "task.path") -> None:
        self._tokenizer, self._chat, self._seed = tokenizer, chat_template, seed
        self._rows = read(path, key)
        self._orders: dict[str, tuple[int, list[int]]] = {}
        # Fail now, not mid-run, if the tokenizer has no chat template.
        self._tokens(self._rows[0].question)

    def prompt(self, group: int, stream: str = "prompt") -> Prompt:
        """Return the question of group `group`."""
        row = self._row(stream, group)
        return Prompt(row.question, self._tokens(row.question), row.reference)

    def demonstration(self, index: int) -> Demonstration:
        """Return a question and its whole solution."""
        row = self._row("demonstration", index)
        solution = (*self._tokenizer.encode(row.solution), self._tokenizer.eos)
        return demonstrate(self._tokens(row.question), solution)

    def golds(self) -> Iterator[Gold]:
        """See `HasGolds`."""
        return (Gold(row.where, row.reference) for row in self._rows)

    def _tokens(self, question: str) -> tuple[int, ...]:
        return self._tokenizer.chat(question) if self._chat else self._tokenizer.encode(question + "\n")

    def _row(self, stream: str, index: int) -> JsonLine:
        epoch, place = divmod(index, len(self._rows))
        if self._orders.get(stream, (-1,))[0] != epoch:
            order = list(range(len(self._rows)))
            Random(f"{self._seed} {stream} {epoch}").shuffle(order)
            self._orders[stream] = epoch, order
        return self._rows[self._orders[stream][1][place]]


def read(path: Path, key: str = "task.path") -> list[JsonLine]:
    """Read all lines of a file; blank lines are skipped.

    Raises:
        DataError: no such file, no lines, or a line that is not {"question": text, "answer": text}; names file and line.
    """
    try:
        # Not splitlines: JSON text may contain other line separators than "\n".
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{key} {path}", got=str(error), expected="a JSONL file in UTF-8") from error
    rows = [_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise DataError(f"{key} {path}", got="no lines", expected='at least one {"question": ..., "answer": ...}')
    return rows


def _row(path: Path, number: int, line: str) -> JsonLine:
    where = f"{path} line {number}"
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(where, got=f"invalid JSON ({error})", expected='{"question": ..., "answer": ...}') from error
    if not isinstance(values, dict):
        raise DataError(where, got=type(values).__name__, expected="an object with question and answer")
    for name in ("question", "answer"):
        value = values.get(name)
        if not isinstance(value, str) or not value.strip():
            got = "nothing" if name not in values else repr(value)
            raise DataError(f"{where}, {name}", got=got, expected="non-empty text")
    reference = values["answer"].rpartition(MARK)[2].strip()
    if not reference:
        raise DataError(f"{where}, answer", got=f"nothing after {MARK}", expected="the reference answer")
    return JsonLine(values["question"], values["answer"], reference, where)
