"""Write and read the records of a run, and follow them while they are written: JSON lines, unbuffered."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from asyncmoe.errors import DataError, an
from asyncmoe.storage import writing
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout
from asyncmoe.telemetry.schema import EVALUATION, METRICS, ROLLOUT, Resume, Span, Step

Followed = Step | Resume | Rollout | Evaluation
Feed = Callable[[list[Followed]], None]
"""Consumes new records, possibly none. Each record comes once; records of one file come in order."""
Record = Followed | Span
T = TypeVar("T")


class JsonLines:
    """Appends one JSON object per line; a reader sees each record immediately.

    Opening the file truncates an incomplete line of a killed writer. Numbers that are not finite are written as null. Each file has one
    writer, whose `write` is thread-safe.

    Args:
        mode: permissions of a new file; None: the process's default.

    Raises:
        StorageError: the file cannot be opened or written. A record is written completely or not at all.
    """

    def __init__(self, path: Path, mode: int | None = None) -> None:
        self.path, self._lock = path, threading.Lock()
        with writing("records of the run", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(path)
            if mode is not None:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT, mode))
            # Unbuffered: closing a buffered file would retry a failed write.
            self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any] | Record) -> None:
        """Append a record, either a mapping or a struct of `schema`. NumPy and torch scalars are written as numbers."""
        self.append(msgspec.json.encode(record, enc_hook=_number) + b"\n")

    def append(self, line: bytes) -> None:
        """Append an encoded record, with its line feed."""
        left = line
        with self._lock, writing("records of the run", self.path):
            try:
                while left:
                    left = left[self._file.write(left) :]
            except OSError:
                with suppress(OSError):
                    os.truncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - len(line) + len(left))
                raise

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Tail:
    """Reads the records appended to a file since the last `poll`; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._line = 0

    def poll_as(self, kind: type[T]) -> list[T]:
        """Return the new records. An incomplete last line is left for the next call.

        Raises:
            DataError: a complete line is not a JSON object, or a field is missing or has a wrong type; names file and line.
        """
        return [decoded(where, line, kind) for where, line in self.lines()]

    def poll_steps(self) -> list[Step | Resume]:
        """Like `poll_as`, for metrics.jsonl."""
        return [decoded(where, line, Resume) if b'"resumed_at"' in line else decoded(where, line, Step) for where, line in self.lines()]

    def lines(self) -> Iterator[tuple[str, bytes]]:
        """Return the new lines, undecoded, each with its location."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return iter(())
        *lines, torn = new.split(b"\n")
        first = self._line + 1
        self._offset += len(new) - len(torn)
        self._line += len(lines)
        return ((f"{self.path} line {number}", line) for number, line in enumerate(lines, first))


class Follower:
    """Tails the metrics, rollout and evaluation records of a run directory, which may not exist yet."""

    def __init__(self, run_dir: Path) -> None:
        self._metrics = Tail(run_dir / METRICS)
        self._rollout = Tail(run_dir / ROLLOUT)
        self._evaluations = Tail(run_dir / EVALUATION)

    def poll(self) -> list[Followed]:
        """Return the records written since the last call.

        Raises:
            DataError: a complete line is malformed; names file and line.
        """
        return [*self._metrics.poll_steps(), *self._rollout.poll_as(Rollout), *self._evaluations.poll_as(Evaluation)]


def read_evaluations(path: Path) -> list[Evaluation]:
    """Read the valid records of evaluation.jsonl, by ascending version. A record supersedes those before it that have its own version and
    set, or a later version.

    Raises:
        DataError: a complete line is not a JSON object, or a field is missing or has a wrong type; names file and line.
    """
    found: list[Evaluation] = []
    for record in Tail(path).poll_as(Evaluation):
        valid = (one for one in found if one.version < record.version or (one.version == record.version and one.name != record.name))
        found = [*valid, record]
    return found


def read_steps(path: Path) -> list[Step]:
    """Read the valid steps of metrics.jsonl, in ascending order, each once; see `sessions`.

    Raises:
        DataError: see `read_evaluations`.
    """
    return list(chain.from_iterable(sessions(Tail(path).poll_steps())))


def sessions(records: Iterable[Step | Resume]) -> list[list[Step]]:
    """Return the valid (not superseded) steps, split into sessions, one per start of the trainer.

    A `Resume` supersedes every earlier record of a step after `resumed_at`. A step that is not later than its predecessor supersedes every
    earlier record of the same or a later step. Empty sessions are not returned.
    """
    found: list[list[Step]] = [[]]
    for record in records:
        last = next((session[-1].step for session in reversed(found) if session), None)
        if isinstance(record, Resume):
            found = [*_until(found, record.resumed_at), []]
            continue
        if last is not None and record.step <= last:
            found = [*_until(found, record.step - 1), []]
        found[-1].append(record)
    return [session for session in found if session]


def trainer_restarts(records: Iterable[Step | Resume]) -> int:
    """Return how often the trainer was restarted in place, over all starts of the run, counting only starts that began to train."""
    count = before = 0
    for record in records:
        if isinstance(record, Resume):
            count += max(0, record.epoch - before)
            before = record.epoch
    return count


def _until(found: list[list[Step]], last: int) -> list[list[Step]]:
    return [[step for step in session if step.step <= last] for session in found]


def decoded(where: str, content: bytes, kind: type[T], expected: str = "", hint: str | None = None) -> T:
    """Decode JSON of a run.

    Args:
        where: the file, and the line in it.
        expected: the expected content, in words; "": a record of the kind's name.

    Raises:
        DataError: the content is something else.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except ValueError as error:
        raise DataError(where, got=str(error), expected=expected or f"{an(kind.__name__)} record", hint=hint) from error


def _cut_torn_line(path: Path) -> None:
    if not path.exists() or not (size := path.stat().st_size):
        return
    with path.open("rb+") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            whole = text.rfind(b"\n") + 1
        if whole < size:
            file.truncate(whole)


def _number(value: object) -> object:
    item = getattr(value, "item", None)
    if callable(item):
        return item()
    raise TypeError(f"a record holds numbers, strings, lists and mappings, not {type(value).__name__}")
