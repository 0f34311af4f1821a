"""Questions from a file in GSM8K's format: one {"question": ..., "answer": "reasoning #### 42"} per line, and any other columns."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncmoe.config.task import ColumnsSection
from asyncmoe.errors import DataError
from asyncmoe.rollout.scoring.types import MARK
from asyncmoe.rollout.tasks.encode import check_columns, check_prompt
from asyncmoe.rollout.tasks.rows import Keep, none_left
from asyncmoe.rollout.tasks.types import Example

_NO_ANSWER = "leave such rows out by task.filter, or set task.columns.answer=null if nothing needs answers"


def read(path: Path, key: str = "task.path", columns: ColumnsSection | None = None, keep: Keep | None = None) -> list[Example]:
    """Read all lines of a file; blank lines are skipped.

    Args:
        key: configuration key that names the file.
        columns: names of the columns.
        keep: which lines to keep.

    Raises:
        DataError: no such file, no lines, or a line without the columns; names file and line.
    """
    rows, skipped = [], 0
    for where, values in values_of(path, key):
        if keep is None or keep(where, values):
            rows.append(example_of(where, values, columns or ColumnsSection()))
        else:
            skipped += 1
    if not rows:
        raise none_left(f"{key} {path}", skipped)
    return rows


def values_of(path: Path, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield "FILE line N" and the object of every line that is not blank. Raises as `read`."""
    try:
        # Binary, because text in JSON may contain line separators other than "\n".
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                raw = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line  # as editors on Windows write
                if raw.strip():
                    yield f"{path} line {number}", _object(f"{path} line {number}", raw)
    except OSError as error:
        raise DataError(f"{key} {path}", got=(error.strerror or str(error)).lower(), expected="a JSONL file in UTF-8") from error


def _object(where: str, raw: bytes) -> Mapping[str, Any]:
    try:
        values = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(where, got=f"invalid JSON ({error})", expected='{"question": ..., "answer": ...} in UTF-8') from error
    if not isinstance(values, dict):
        raise DataError(where, got=type(values).__name__, expected="an object with question and answer")
    return values


def example_of(where: str, values: Mapping[str, Any], columns: ColumnsSection) -> Example:
    """Return the example in a row of a file or data set. Its reference is the text after the last `MARK`, or without a mark the whole
    answer, as written: scorers decide what a comma means. Its solution is the whole answer.

    Args:
        where: the row, for messages.

    Raises:
        DataError: the question is neither text nor messages, the answer neither text nor number, or a column is missing; names row and
            column.
    """
    question = _value(where, values, columns.question)
    check_prompt(question, f"{where}, {columns.question}")
    answer = "" if columns.answer is None else _answer(where, values, columns.answer)
    reference = answer.rpartition(MARK)[2].strip()
    if not reference and columns.answer is not None:
        raise DataError(f"{where}, {columns.answer}", got=f"nothing after {MARK}", expected="the reference answer", hint=_NO_ANSWER)
    return Example(question, reference, _others(where, values, columns), answer or None, where)


def _value(where: str, values: Mapping[str, Any], name: str) -> Any:
    if name in values:
        return values[name]
    hint = f"its columns are {', '.join(map(str, values))}"[:300] + "; name yours in task.columns" if values else None
    raise DataError(f"{where}, {name}", got="nothing", expected="a column of this name", hint=hint)


def _answer(where: str, values: Mapping[str, Any], name: str) -> str:
    value = _value(where, values, name)
    if isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf:  # NaN: a table's empty cell
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}, {name}", got=repr(value)[:100], expected="non-empty text or a number", hint=_NO_ANSWER)
    return value


def _others(where: str, values: Mapping[str, Any], columns: ColumnsSection) -> Mapping[str, Any]:
    if columns.keep is None:
        found = {name: value for name, value in values.items() if name not in (columns.question, columns.answer)}
    else:
        found = {name: _value(where, values, name) for name in columns.keep}
    check_columns(found, where)
    return found
