"""Writes checkpoints with Megatron's asynchronous save, in this process alone.

Megatron plans a save and turns it into a request (`AsyncRequest`), whose function starts or forks processes that write
(dist_checkpointing/strategies/filesystem_async.py). These outlive a rank that ends abruptly (`os._exit`, SIGKILL), and a rank waits forever
for a killed fork; 0.19 writes in threads, but loses the reason for a failure. Here Megatron's own function for one file is called in the
current thread, and its results go through a queue of this process. The patch is installed everywhere, also with a GPU.
"""

from __future__ import annotations

import inspect
import queue
from pathlib import Path
from typing import Any

from asyncmoe.platform.megatron.patch import gone, module

FORMAT = ("torch_dist", 1)
"""The only format that is written and loaded: `reader` checks its files."""
_GETTERS = ("_get_write_results_queue", "get_write_results_queue")
"""Names of the function that returns the queue, in 0.16.1 and in 0.19.2."""


def install() -> None:
    """Use a new queue for each save; Megatron's lives in a process that it starts.

    Raises:
        ConfigError: this version of Megatron writes differently.
    """
    owner = module("dist_checkpointing.strategies.filesystem_async")
    name = next((name for name in _GETTERS if hasattr(owner, name)), None)
    if name is None or not hasattr(getattr(owner, "FileSystemWriterAsync", None), "write_preloaded_data"):
        raise gone("FileSystemWriterAsync.write_preloaded_data")
    setattr(owner, name, queue.Queue)


class Planner:
    """Plans a run's saves. Once two plans agree, the plan is reused: shapes and locations do not change."""

    def __init__(self) -> None:
        self._strategy = module("dist_checkpointing.strategies.torch").TorchDistSaveShardedStrategy(
            *FORMAT, thread_count=1, cached_metadata=True
        )
        self._checked = False

    def plan(self, state: dict[str, Any], folder: Path, *, copy: bool) -> Planned:
        """Plan each rank's writes, and write the state common to all ranks. Collective over all ranks; call it between steps.

        Args:
            state: Megatron's sharded state.
            folder: an empty directory.
            copy: copy tensors in host memory, because they change during the write; tensors on a GPU are copied to host memory in any case.
        """
        save = module("dist_checkpointing").save
        chosen = {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(save).parameters else {}
        request = save(state, str(folder), self._strategy, validate_access_integrity=not self._checked, async_sharded_save=True, **chosen)
        self._checked = True
        return Planned(request, copy)


class Planned:
    """This rank's writes of one save.

    Attributes:
        paths: paths of its files.
    """

    def __init__(self, request: Any, copy: bool) -> None:
        self._request = request
        if request.async_fn is not None:
            buckets = request.async_fn_args[1]
            staged = zip(buckets, request.preload_fn(), strict=True)
            buckets[:] = [_copied(live, host) if copy else host for live, host in staged]
        self._buckets = request.async_fn_args[1] if request.async_fn is not None else []
        self.paths = [Path(path) for path, _, _ in self._buckets]

    def write(self) -> None:
        """Write and sync the files.

        Raises:
            OSError: a file cannot be written; torch may raise RuntimeError instead, perhaps without the reason.
        """
        if self._request.async_fn is None:
            return
        writer = module("dist_checkpointing.strategies.filesystem_async").FileSystemWriterAsync
        transforms, *_ = self._request.async_fn.args
        found: dict[int, Any] = {}
        for index, bucket in enumerate(self._buckets):
            answers: queue.Queue[tuple[int, Any]] = queue.Queue()
            counts: queue.Queue[int] = queue.Queue()
            counts.put(index)
            writer.write_preloaded_data(transforms, index, bucket, answers, counts, True)
            _, found[index] = answers.get_nowait()
            if isinstance(found[index], Exception):
                raise found[index]
        self._request.async_fn_args[2].put(found)

    def finish(self) -> None:
        """Write the list of all ranks' tensors, after all have written. Collective over all ranks."""
        for finalize in self._request.finalize_fns:
            finalize()


def _copied(live: Any, host: Any) -> Any:
    """Copy a Megatron bucket, so that training does not change its tensors."""
    path, name, (objects, tensors) = host
    kept = [(item, tensor.clone() if tensor is own else tensor) for (item, tensor), (_, own) in zip(tensors, live[2][1], strict=True)]
    return path, name, (objects, kept)
