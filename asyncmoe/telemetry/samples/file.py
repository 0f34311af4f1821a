"""Writes samples within the bound of their folder, and never ends a run for them."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import msgspec

from asyncmoe.errors import StorageError
from asyncmoe.storage import writing
from asyncmoe.telemetry.records import JsonLines
from asyncmoe.telemetry.samples.records import FOLDER, FORMAT, ROLLOUT_SAMPLES, TRAINER_SAMPLES, Begin, Full, SampleRecord

log = logging.getLogger(__name__)
_KEPT_FREE = 256
"""Bytes kept free for the `Full` record of each file."""


class SampleFile:
    """Appends records to a file of run_dir/samples, which only the owner can read. Thread-safe.

    When the folder has reached its bound, or a write fails, the log says so once, and nothing more is written.

    Args:
        name: `ROLLOUT_SAMPLES` or `TRAINER_SAMPLES`.
        max_bytes: bound on the size of the folder.
        step: as in `Begin`.
    """

    def __init__(self, run_dir: Path, name: str, max_bytes: int, step: int) -> None:
        self._folder, self._most, self._lock = run_dir / FOLDER, max_bytes, threading.Lock()
        self._paths = [str(self._folder / one) for one in (ROLLOUT_SAMPLES, TRAINER_SAMPLES)]
        self._lines: JsonLines | None = None
        try:
            with writing("samples of the run", self._folder):
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lines = JsonLines(self._folder / name, mode=0o600)
        except StorageError as error:
            log.warning("no samples are kept (asyncmoe show): %s", error)
        else:
            self.write(Begin(time=time.time(), format=FORMAT, step=step))

    @property
    def is_open(self) -> bool:
        """Whether records are still written."""
        return self._lines is not None

    def write(self, *records: SampleRecord) -> None:
        """Append records; all or none of them if the bound is near."""
        text = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        with self._lock:
            if self._lines is None:
                return
            try:
                if self._size() + len(text) + 2 * _KEPT_FREE > self._most:
                    self._fill()
                else:
                    self._lines.append(text)
            except (StorageError, OSError) as error:
                log.warning("no more samples are kept (asyncmoe show): %s", error)
                self._close()

    def close(self) -> None:
        """Close the file; later records are ignored."""
        with self._lock:
            self._close()

    def _fill(self) -> None:
        assert self._lines is not None
        line = msgspec.json.encode(Full(time=time.time(), bound=self._most)) + b"\n"
        if self._size() + len(line) <= self._most:
            self._lines.append(line)
        log.warning("%s is full: it has %d bytes; no more groups are kept, the run goes on", self._folder, self._most)
        self._close()

    def _size(self) -> int:
        return sum(map(_size, self._paths))

    def _close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
