"""Rows of text files: JSON, JSON Lines, CSV and TSV, also compressed by gzip.

Text stays text: a cell of a table is never taken for a number, a date or a missing value, and JSON has the types that it was written with.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import BytesIO, TextIOWrapper
from pathlib import Path, PurePath
from typing import Any, BinaryIO, cast

import msgspec

from asyncmoe.errors import DataError
from asyncmoe.rollout.tasks.rows import Row

_EXPECTED = '{"question": ..., "answer": ...} in UTF-8'
_LONGEST_CELL = 2**31 - 1


def kind(path: PurePath) -> str:
    """Return the suffix that says how a file is read, in lower case: of a file with ".gz", the suffix before it."""
    return PurePath(path.name.lower().removesuffix(".gz")).suffix


def rows(path: Path, key: str, suffix: str | None = None) -> Iterator[tuple[str, Row]]:
    """Yield the name of each row, for messages, and its values by column.

    Args:
        key: configuration key that names the file.
        suffix: one of `READERS`; None: the file's `kind`.

    Raises:
        DataError: no such file, or one that is not of its kind; names file and line.
    """
    suffix, gzipped = suffix or kind(path), path.suffix.lower() == ".gz"
    try:
        with gzip.open(path) if gzipped else path.open("rb") as file:
            yield from READERS[suffix](cast(BinaryIO, file), str(path))
    except (OSError, EOFError, zlib.error) as error:
        got = (getattr(error, "strerror", None) or str(error)).lower()
        raise DataError(f"{key} {path}", got=got, expected=f"a {suffix} file in UTF-8" + (" under gzip" if gzipped else "")) from error


def _lines(file: BinaryIO, name: str) -> Iterator[tuple[str, Row]]:
    # Binary, because text in JSON may contain line separators other than "\n".
    for number, line in enumerate(file, 1):
        where, raw = f"{name} line {number}", line.removeprefix(codecs.BOM_UTF8) if number == 1 else line  # as editors on Windows write
        if raw.strip():
            yield _object(where, _decoded(where, raw))


def _list_or_lines(file: BinaryIO, name: str) -> Iterator[tuple[str, Row]]:
    raw = file.read().removeprefix(codecs.BOM_UTF8)
    if not raw.lstrip().startswith(b"["):
        yield from _lines(BytesIO(raw), name)
        return
    for number, values in enumerate(_decoded(name, raw)):
        yield _object(f"{name} row {number}", values)


def _decoded(where: str, raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(where, got=f"invalid JSON ({error})", expected=_EXPECTED) from error


def _object(where: str, values: object) -> tuple[str, Row]:
    if not isinstance(values, dict):
        raise DataError(where, got=type(values).__name__, expected="an object with question and answer")
    return where, values


def _table(separator: str, file: BinaryIO, name: str) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(_LONGEST_CELL)
    lines = csv.reader(TextIOWrapper(file, "utf-8-sig", newline=""), delimiter=separator, strict=True)
    try:
        header = next(lines, [])
        if twice := [cell for number, cell in enumerate(header) if cell in header[:number]]:
            raise DataError(f"{name} line 1", got=f"{twice[0]!r} twice", expected="a different name for each column")
        for cells in lines:
            if len(cells) not in (0, len(header)):
                got, expected = f"{len(cells)} cells", f"{len(header)}, as in the first line"
                raise DataError(f"{name} line {lines.line_num}", got=got, expected=expected)
            if cells:
                yield f"{name} line {lines.line_num}", dict(zip(header, cells, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        where = name if isinstance(error, UnicodeDecodeError) else f"{name} line {lines.line_num}"  # decoded many lines at once
        raise DataError(where, got=str(error), expected="a table in UTF-8, quoted as RFC 4180 has it") from error


READERS: Mapping[str, Callable[[BinaryIO, str], Iterator[tuple[str, Row]]]] = {
    ".jsonl": _lines,
    ".json": _list_or_lines,
    ".csv": partial(_table, ","),
    ".tsv": partial(_table, "\t"),
}
"""Readers by the suffix of a file."""
