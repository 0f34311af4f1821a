"""The data of the live page: read again when the runs' files have changed, and at most for a tenth of the time."""

from __future__ import annotations

import gzip
import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from asyncmoe.errors import DataError
from asyncmoe.telemetry.report.run_page import RunPage, SampleList, encoded_group, kept_groups, names, run_page
from asyncmoe.telemetry.report.sample_groups import heads
from asyncmoe.telemetry.samples.index import Index
from asyncmoe.telemetry.samples.records import FOLDER, ROLLOUT_SAMPLES, TRAINER_SAMPLES
from asyncmoe.telemetry.samples.visible import visible
from asyncmoe.telemetry.schema import CONTROLLER_SPANS, EVALUATION, METRICS, ROLLOUT, TRAINER_SPANS

LISTED = 500
"""Groups in the live page's list, the newest ones."""
_FILES = (METRICS, ROLLOUT, EVALUATION, TRAINER_SPANS, CONTROLLER_SPANS, f"{FOLDER}/{ROLLOUT_SAMPLES}", f"{FOLDER}/{TRAINER_SAMPLES}")
_LEAST_S = 1.0
_REST = 9.0
"""Pause after reading, as a multiple of the time that reading took."""

Signature = tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class LiveData:
    """The packed JSON of a list of `RunPage` with gzip, and a tag that changes with it."""

    body: bytes
    tag: str


class WatchedRuns:
    """Reads runs for the live page. Thread-safe."""

    def __init__(self, run_dirs: Sequence[Path], samples: bool) -> None:
        self._dirs, self._names, self._samples = run_dirs, names(run_dirs), samples
        self._lock = threading.Lock()
        self._pages: dict[int, tuple[Signature, RunPage]] = {}
        self._indices: dict[int, Index] = {}
        self._data: LiveData | None = None
        self._rest_until = 0.0

    def data(self) -> LiveData:
        """Return the newest data, or what was read a moment ago."""
        with self._lock:
            if self._data is None or time.monotonic() >= self._rest_until:
                begin = time.monotonic()
                self._data = self._read()
                self._rest_until = time.monotonic() + max(_LEAST_S, _REST * (time.monotonic() - begin))
            return self._data

    def group(self, run: int, place: int) -> bytes | None:
        """Return the JSON of a group of the list, with all its tokens; None if there is none there.

        Raises:
            DataError: its records cannot be read.
        """
        with self._lock:
            found = self._indices.get(run)
        if found is None or not 0 <= place < len(found.entries):
            return None
        return encoded_group(found, place)

    def _read(self) -> LiveData:
        pages = [self._page(number) for number in range(len(self._dirs))]
        plain = msgspec.json.encode(pages)
        return LiveData(gzip.compress(plain, 6, mtime=0), hashlib.sha256(plain).hexdigest()[:32])

    def _page(self, number: int) -> RunPage:
        now = _signature(self._dirs[number])
        if number in self._pages and self._pages[number][0] == now:
            return self._pages[number][1]
        page = self._new(number)
        self._pages[number] = (now, page)
        return page

    def _new(self, number: int) -> RunPage:
        run_dir, name = self._dirs[number], self._names[number]
        if not run_dir.is_dir():
            self._indices.pop(number, None)
            return RunPage(name, waiting=visible(f"{run_dir} is gone: it was deleted or moved"))
        listed = self._listed(number) if self._samples else SampleList((), 0, ("this page is served without samples",))
        try:
            return run_page(run_dir, name, listed)
        except (DataError, OSError) as error:
            return replace(RunPage(name), waiting=visible(str(error)), samples=listed)

    def _listed(self, number: int) -> SampleList:
        found = kept_groups(self._dirs[number])
        if isinstance(found, str):
            self._indices.pop(number, None)
            return SampleList((), 0, (found,))
        self._indices[number] = found
        count = len(found.entries)
        return SampleList(heads(found, range(max(count - LISTED, 0), count)), count, found.notes)


def _signature(run_dir: Path) -> Signature:
    there = (0, 0) if run_dir.is_dir() else None
    return (there, *(_of_file(run_dir / name) for name in _FILES))


def _of_file(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
