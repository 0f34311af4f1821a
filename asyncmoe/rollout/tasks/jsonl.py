"""Questions from a file in GSM8K's format: one {"question": ..., "answer": "reasoning #### 42"} a line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

from asyncmoe.errors import DataError
from asyncmoe.rollout.tasks import Demonstration, Prompt, demonstrate
from asyncmoe.rollout.tokenizer import Tokenizer

MARK = "####"
"""What separates the reasoning from the reference answer."""


@dataclass(frozen=True)
class JsonLine:
    """A line of the file."""

    question: str
    solution: str
    """All of "answer": the reasoning and the reference."""
    reference: str
    """What follows the last `MARK`, or all of "answer" without one; thousands separators removed as GSM8K's own scorer does."""


class JsonlTask:
    """Every line once, in an order drawn from the seed, then all again in another.

    Args:
        chat_template: put the question through the tokenizer's chat template; otherwise it is followed by a line break.
        key: of the configuration, that names the file.

    Raises:
        DataError: a line that is not as said above; names file and line.
    """

    def __init__(self, tokenizer: Tokenizer, path: Path, chat_template: bool, seed: int, key: str = "task.path") -> None:
        self._tokenizer, self._chat, self._seed = tokenizer, chat_template, seed
        self._rows = read(path, key)
        self._orders: dict[str, tuple[int, list[int]]] = {}
        # A tokenizer that cannot do it is found out now, not in the middle of the run.
        self._tokens(self._rows[0].question)

    def prompt(self, group: int, stream: str = "prompt") -> Prompt:
        """The question of group `group`."""
        row = self._row(stream, group)
        return Prompt(row.question, self._tokens(row.question), row.reference)

    def demonstration(self, index: int) -> Demonstration:
        """A question and its whole solution."""
        row = self._row("demonstration", index)
        solution = (*self._tokenizer.encode(row.solution), self._tokenizer.eos)
        return demonstrate(self._tokens(row.question), solution)

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
    """All lines of a file; empty ones are passed over.

    Raises:
        DataError: no such file, no lines, or a line that is not {"question": text, "answer": text}.
    """
    try:
        # Not splitlines: a JSON text may hold other line separators than this one.
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
        raise DataError(where, got=f"no JSON ({error})", expected='{"question": ..., "answer": ...}') from error
    if not isinstance(values, dict):
        raise DataError(where, got=type(values).__name__, expected="an object with question and answer")
    for name in ("question", "answer"):
        value = values.get(name)
        if not isinstance(value, str) or not value.strip():
            got = "nothing" if name not in values else repr(value)
            raise DataError(f"{where}, {name}", got=got, expected="a text that is not empty")
    reference = values["answer"].rpartition(MARK)[2].strip().replace(",", "")
    if not reference:
        raise DataError(f"{where}, answer", got=f"nothing after {MARK}", expected="the reference answer")
    return JsonLine(values["question"], values["answer"], reference)
