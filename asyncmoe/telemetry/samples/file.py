"""Write samples within the bound of their folder; a failure never ends the run."""

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
from asyncmoe.telemetry.samples.records import FOLDER, Begin, SampleRecord

log = logging.getLogger(__name__)


class SampleFile:
    """Appends records to a file of run_dir/samples, which only the owner can read. Thread-safe.

    When the file reaches half of the folder's bound, or a write fails, this is logged once and nothing more is written.

    Args:
        name: `ROLLOUT_SAMPLES` or `TRAINER_SAMPLES`.
        max_bytes: bound on the size of the folder.
        step: as in `Begin`.
    """

    def __init__(self, run_dir: Path, name: str, max_bytes: int, step: int) -> None:
        self._path, self._most, self._lock = run_dir / FOLDER / name, max_bytes // 2, threading.RLock()
        self._lines: JsonLines | None = None
        try:
            with writing("samples of the run", self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lines = JsonLines(self._path, mode=0o600)
        except StorageError as error:
            log.warning("no samples are kept (asyncmoe show): %s", error)
        self.write(Begin(time=time.time(), step=step))

    @property
    def is_open(self) -> bool:
        """Whether records are still written."""
        return self._lines is not None

    def write(self, *records: SampleRecord) -> None:
        """Append all records, or none of them if they would exceed the bound."""
        text = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        with self._lock:
            if self._lines is None:
                return
            try:
                if os.stat(self._path).st_size + len(text) <= self._most:
                    self._lines.append(text)
                    return
                log.warning("%s is full: it has %d bytes; no more groups are kept, the run goes on", self._path, self._most)
            except (StorageError, OSError) as error:
                log.warning("no more samples are kept (asyncmoe show): %s", error)
            self.close()

    def close(self) -> None:
        """Close the file; later records are ignored."""
        with self._lock:
            if self._lines is not None:
                self._lines.close()
                self._lines = None
