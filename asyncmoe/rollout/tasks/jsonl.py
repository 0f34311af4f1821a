"""Questions from rows in GSM8K's format: {"question": ..., "answer": "reasoning #### 42"}, and any other columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from asyncmoe.config.task import ColumnsSection
from asyncmoe.errors import DataError
from asyncmoe.rollout.scoring.types import MARK
from asyncmoe.rollout.tasks import text_files
from asyncmoe.rollout.tasks.encode import check_columns, check_prompt
from asyncmoe.rollout.tasks.rows import Keep, Row, none_left, reached
from asyncmoe.rollout.tasks.types import Example

_NO_ANSWER = "leave such rows out by task.filter, or set task.columns.answer=null if nothing needs answers"


def read(path: Path, key: str = "task.path", columns: ColumnsSection | None = None, keep: Keep | None = None) -> list[Example]:
    """Read all lines of a file, whatever its name; blank lines are skipped. Arguments and errors are those of `examples`.

    Args:
        key: configuration key that names the file.
    """
    return examples(text_files.rows(path, key, ".jsonl"), f"{key} {path}", columns, keep)


def examples(rows: Iterable[tuple[str, Row]], name: str, columns: ColumnsSection | None, keep: Keep | None) -> list[Example]:
    """Return the examples in the rows of a file.

    Args:
        rows: as `text_files.rows` yields them.
        name: of the file, for messages.
        columns: names of the columns.
        keep: which rows to keep.

    Raises:
        DataError: no such file, no rows, or a row without the columns; names file and row.
    """
    found, skipped = [], 0
    for where, values in rows:
        if keep is None or keep(where, values):
            found.append(example_of(where, values, columns or ColumnsSection()))
        else:
            skipped += 1
    if not found:
        raise none_left(name, skipped)
    return found


def example_of(where: str, values: Mapping[str, Any], columns: ColumnsSection) -> Example:
    """Return the example in a row of a file or data set. Its reference is the text after the last `MARK`, or without a mark the whole
    answer, as written: scorers decide what a comma means. Its solution is the whole answer.

    Args:
        where: the row, for messages.

    Raises:
        DataError: the question is neither text nor messages, the answer neither text nor number, or a column is missing; names row and
            column.
    """
    question = _without_nulls(_value(where, values, columns.question))
    check_prompt(question, f"{where}, {columns.question}")
    answer = "" if columns.answer is None else _answer(where, values, columns.answer)
    reference = answer.rpartition(MARK)[2].strip()
    if not reference and columns.answer is not None:
        raise DataError(f"{where}, {columns.answer}", got=f"nothing after {MARK}", expected="the reference answer", hint=_NO_ANSWER)
    return Example(question, reference, _others(where, values, columns), answer or None, where)


def _value(where: str, values: Mapping[str, Any], name: str) -> Any:
    try:
        return reached(values, name)
    except KeyError as error:
        hint = f"its columns are {', '.join(map(str, values))}"[:300] + "; name yours in task.columns" if values else None
        raise DataError(f"{where}, {name}", got="nothing", expected="a column of this name", hint=hint) from error


def _without_nulls(question: Any) -> Any:
    """Return messages without keys that are null: Arrow gives every message the keys of all messages, and a template would use the nulls.
    `content` remains: it is null where an assistant only calls tools."""
    if not isinstance(question, list):
        return question
    return [{**_filled(one), "content": one.get("content")} if isinstance(one, Mapping) else one for one in question]


def _filled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _filled(one) for key, one in value.items() if one is not None}
    return [_filled(one) for one in value] if isinstance(value, list) else value


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
