"""Profiles of chosen steps: traces of PyTorch's profiler, snapshots of the GPU's allocator, and NVTX ranges.

`mark` names a part of a step in both. It costs one function call when nothing is profiled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from asyncmoe.config import Config
from asyncmoe.errors import ConfigError, StorageError
from asyncmoe.storage import writing

log = logging.getLogger(__name__)

FOLDER = "profile"
_MOST_MB = 2048
"""Largest profile that is kept, in MB."""
_MOST_ALLOCATIONS = 100_000
"""Allocator events in a snapshot; older ones are dropped."""
_NOTHING = nullcontext()
_marker: Callable[[str], AbstractContextManager[Any]] | None = None


def mark(name: str) -> AbstractContextManager[Any]:
    """Name the block in NVTX and in the trace of this step, if any."""
    return _NOTHING if _marker is None else _marker(name)


class Profiler:
    """Profiles the configured steps of one rank.

    Raises:
        ConfigError: `telemetry.nvtx`, or nothing but a snapshot of a GPU's memory, without a GPU.
    """

    def __init__(self, config: Config, rank: int) -> None:
        global _marker
        section = config.telemetry.profile
        self._section, self._rank, self._folder = section, rank, config.run.dir / FOLDER
        self._steps = frozenset(section.steps) if section is not None and rank in section.ranks else frozenset[int]()
        if section is not None and not section.trace and not torch.cuda.is_available():
            hint = "without one, allocations are in the trace"
            got = "false, and this machine shows the trainer no GPU to take a snapshot of"
            raise ConfigError("telemetry.profile.trace", got=got, expected="true", hint=hint)
        self._nvtx = config.telemetry.nvtx
        if self._nvtx:
            if not torch.cuda.is_available():
                raise ConfigError("telemetry.nvtx", got="true", expected="false, because this machine shows the trainer no GPU")
            _megatron_ranges()
        _marker = torch.cuda.nvtx.range if self._nvtx else None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the block if it is a chosen step; `number` counts as in metrics.jsonl. What cannot be written is logged, and the run
        goes on."""
        if number not in self._steps:
            with mark(f"step {number}"):
                yield
            return
        path = self._folder / f"step-{number}-rank-{self._rank}"
        with ExitStack() as recording:
            recording.enter_context(self._memory(path.with_suffix(".memory.pickle")))
            recording.enter_context(self._trace(path.with_suffix(".trace.json.gz")))
            recording.enter_context(mark(f"step {number}"))
            yield

    @contextmanager
    def _trace(self, path: Path) -> Iterator[None]:
        section = self._section
        assert section is not None
        if not section.trace:
            yield
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with (
            torch.profiler.profile(activities=activities, profile_memory=section.memory) as profile,
            _marked(torch.profiler.record_function, self._nvtx),
        ):
            yield
        _write(path, lambda: profile.export_chrome_trace(str(path)))

    @contextmanager
    def _memory(self, path: Path) -> Iterator[None]:
        section = self._section
        assert section is not None
        if not section.memory or not torch.cuda.is_available():
            yield
            return
        torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
        try:
            yield
        finally:  # out of memory too: then the snapshot is wanted most
            dump: Any = torch.cuda.memory._dump_snapshot  # untyped
            _write(path, lambda: dump(str(path)))
            torch.cuda.memory._record_memory_history(enabled=None)


@contextmanager
def _marked(marker: Callable[[str], AbstractContextManager[Any]], nvtx: bool) -> Iterator[None]:
    """Let `mark` use `marker` within the block; with `nvtx` NVTX as well."""
    global _marker
    before = _marker

    def both(name: str) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(torch.cuda.nvtx.range(name))
        stack.enter_context(marker(name))
        return stack

    _marker = both if nvtx else marker
    try:
        yield
    finally:
        _marker = before


def _write(path: Path, act: Callable[[], object]) -> None:
    """Write a profile; keep it if it is not too large."""
    begin = time.perf_counter()
    try:
        with writing("profile", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            act()
            size = path.stat().st_size / 1e6
            if size > _MOST_MB:
                path.unlink()
    except StorageError as error:
        log.warning("%s; training goes on", error)
        return
    if size > _MOST_MB:
        log.warning("%s had %.0f MB, more than %d: it was not kept", path, size, _MOST_MB)
    else:
        log.info("wrote %s, %.1f MB, in %.1f s", path, size, time.perf_counter() - begin)


def _megatron_ranges() -> None:
    """Have Megatron name its own parts too."""
    from megatron.core.utils import configure_nvtx_profiling

    configure_nvtx_profiling(True)
