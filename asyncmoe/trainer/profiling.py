"""Profiles of chosen steps: traces of PyTorch's profiler, and snapshots of the GPU's allocator.

`mark` names a part of a step in both, and in NVTX if `nsys` requests that from PyTorch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from asyncmoe.config import Config
from asyncmoe.errors import StorageError
from asyncmoe.storage import writing

log = logging.getLogger(__name__)

FOLDER = "profile"
_MOST_ALLOCATIONS = 100_000
"""Allocator events in a snapshot; older ones are dropped."""


mark = torch.profiler.record_function
"""Names a block in the trace of this step, if any."""


class Profiler:
    """Profiles the configured steps of one rank."""

    def __init__(self, config: Config, rank: int) -> None:
        section = config.telemetry.profile
        self._rank, self._folder = rank, config.run.dir / FOLDER
        self._steps = section.steps if section is not None and rank in section.ranks else ()
        self._memory = section is not None and section.memory

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the block if it is a chosen step; `number` counts as in metrics.jsonl. A failed write is logged, and the run goes on."""
        if number not in self._steps:
            with mark(f"step {number}"):
                yield
            return
        path = self._folder / f"step-{number}-rank-{self._rank}"
        with self._snapshot(path.with_suffix(".memory.pickle")):
            with torch.profiler.profile(profile_memory=self._memory) as profile, mark(f"step {number}"):
                yield
            trace = path.with_suffix(".trace.json.gz")
            _write(trace, lambda: profile.export_chrome_trace(str(trace)))

    @contextmanager
    def _snapshot(self, path: Path) -> Iterator[None]:
        if not self._memory or not torch.cuda.is_available():
            yield
            return
        torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
        try:
            yield
        finally:  # also when out of memory: that is when the snapshot matters most
            dump: Any = torch.cuda.memory._dump_snapshot  # untyped
            _write(path, lambda: dump(str(path)))
            torch.cuda.memory._record_memory_history(enabled=None)


def _write(path: Path, act: Callable[[], object]) -> None:
    try:
        with writing("profile", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            act()
        log.info("wrote %s", path)
    except StorageError as error:
        log.warning("%s; training goes on", error)
