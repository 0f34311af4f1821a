"""Writes checkpoints in this process alone.

Megatron's `strategies/filesystem_async.py` saves in the background: it starts a process for a queue of results, and 0.16.1 forks another
for each file. These processes outlive a rank that ends abruptly (`os._exit`, SIGKILL), and a rank waits forever for a killed fork.
A save of Megatron's is synchronous here (`snapshot` is for the others), so the queue lives in this process, and threads write the files
with Megatron's own function for a file. 0.19 uses threads too, but loses the reason of a thread's failure. The patch is installed
everywhere, also with a GPU.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asyncmoe.platform.megatron.patch import gone, module

_WRITERS = ("write_preloaded_data_multiproc", "write_preloaded_data_multithread")
"""Functions that write all files of a rank, in 0.16.1 and in 0.19.2."""
_GETTERS = ("_get_write_results_queue", "get_write_results_queue")
_UNCHANGED = "write_preloaded_data"


class Results(queue.Queue[Any]):
    """Results of this rank's saves, with the interface of Megatron's own queue.

    Attributes:
        failure: why this rank's last save failed, or None; Megatron reports other ranks' failures only as text.
        files: names of the files that this rank has written and synced since the list was last cleared.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failure: Exception | None = None
        self.files: list[str] = []

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self.failure = item if isinstance(item, Exception) else None
        super().put(item, block, timeout)


results = Results()


def install() -> None:
    """Replace the queue, and the function that writes all files of a rank.

    Raises:
        ConfigError: this version of Megatron writes differently.
    """
    owner = module("dist_checkpointing.strategies.filesystem_async")
    writer = getattr(owner, "FileSystemWriterAsync", None)
    name = next((name for name in _WRITERS if hasattr(writer, name)), None)
    getter = next((getattr(owner, name) for name in _GETTERS if hasattr(owner, name)), None)
    if name is None or not hasattr(writer, _UNCHANGED):
        raise gone("FileSystemWriterAsync.write_preloaded_data", everywhere=True)
    if getter is None or "_results_queue" not in getattr(getter, "__wrapped__", getter).__code__.co_names:
        raise gone("filesystem_async._results_queue", everywhere=True)
    owner._results_queue = results  # type: ignore[attr-defined]
    setattr(writer, name, staticmethod(_write))


def _write(transforms: list[Any], use_msc: bool, rank: int, buckets: Sequence[Any], found: queue.Queue[Any]) -> None:
    """Write all buckets concurrently, each to its file; put Megatron's results by bucket into `found`, or the first failure."""
    writer = module("dist_checkpointing.strategies.filesystem_async").FileSystemWriterAsync
    answers: queue.Queue[tuple[int, Any]] = queue.Queue()
    counts: queue.Queue[int] = queue.Queue()

    def write(index: int) -> None:
        counts.put(index)
        writer.write_preloaded_data(transforms, index, buckets[index], answers, counts, True, use_msc=use_msc)

    with ThreadPoolExecutor(len(buckets)) as pool:
        list(pool.map(write, range(len(buckets))))
    written = dict(answers.get_nowait() for _ in buckets)
    failed = next((result for result in written.values() if isinstance(result, Exception)), None)
    if failed is None:
        results.files += [name for _, name, _ in buckets]
    found.put(written if failed is None else failed)
