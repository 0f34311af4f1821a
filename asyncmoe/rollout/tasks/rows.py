"""Select the rows of a source to keep: `where` and `filter`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from asyncmoe import plugins
from asyncmoe.config.task import SourceSection
from asyncmoe.errors import DataError

Row = Mapping[str, Any]
Keep = Callable[[str, Row], bool]
"""(row's name for messages, row) -> whether it is kept. Raises DataError if that cannot be determined."""


def reached(row: Row, name: str) -> Any:
    """Return the value of a column; without a column of this name, the value that a dotted name reaches in nested ones. Raises KeyError."""
    if name in row:
        return row[name]
    found: Any = row
    for part in name.split("."):
        if not isinstance(found, Mapping):
            raise KeyError(name)
        found = found[part]
    return found


def keeps(source: SourceSection, key: str) -> Keep | None:
    """Return the test of `source`'s rows; None: all are kept.

    Args:
        key: the section of the source, for messages: "task.sources.1".

    Raises:
        ConfigError: the function cannot be loaded.
    """
    tests: list[Keep] = []
    if source.where is not None:
        wanted = {name: value if isinstance(value, list) else [value] for name, value in source.where.items()}
        tests.append(lambda name, row: all(_one_of(row, column, values, name, key) for column, values in wanted.items()))
    if source.filter is not None:
        function = plugins.load_function(source.filter, f"{key}.filter", forms=plugins.FORM)
        target = source.filter
        tests.append(lambda name, row: _asked(function, target, row, name, key))
    return (lambda name, row: all(test(name, row) for test in tests)) if tests else None


def _one_of(row: Row, column: str, values: list[Any], name: str, key: str) -> bool:
    try:
        found = reached(row, column)
    except KeyError as error:
        hint = f"columns: {', '.join(row)}"[:300]
        raise DataError(f"{name}, {column}", got="nothing", expected=f"the column that {key}.where names", hint=hint) from error
    # Python's 1 == True would mix numbers and booleans.
    return any(found == value and isinstance(found, bool) == isinstance(value, bool) for value in values)


def _asked(function: Callable[..., object], target: str, row: Row, name: str, key: str) -> bool:
    found = plugins.called(lambda: function(row), f"{key}.filter {target}, {name}")
    if isinstance(found, np.bool_):
        return bool(found)
    if not isinstance(found, bool):
        raise DataError(f"{key}.filter, {name}", got=f"{target}: {found!r}"[:200], expected="true or false")
    return found


def none_left(where: str, rows: int) -> DataError:
    """Return the error for a source of which no row is kept.

    Args:
        rows: number of rows that were read.
    """
    if rows:
        return DataError(where, got=f"no row left of {rows}", expected="at least one row that where and filter keep")
    return DataError(where, got="no rows", expected='at least one {"question": ..., "answer": ...}')
