"""The files of a torch_dist checkpoint, as Megatron and torch write them, from memory that nothing else changes."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from asyncmoe import checkpoints, storage
from asyncmoe.config import Config
from asyncmoe.errors import StorageError
from asyncmoe.platform.megatron.reader import COMMON
from asyncmoe.platform.megatron.snapshot import Planned, index_of
from asyncmoe.trainer.model.checkpoint_progress import PlacedShard, Written
from asyncmoe.trajectory.native import crc32c

_CONFIG = "metadata.json"


def write_shards(folder: Path, rank: int, planned: Planned, copies: Sequence[torch.Tensor], moved: Callable[[], None]) -> Written:
    """Write a rank's file, and have it on its disk.

    Args:
        copies: of the plan's shards, in order.
        moved: called whenever some bytes have been written.

    Raises:
        OSError: the file cannot be written; RuntimeError of torch in its place has it as a cause.
    """
    name = f"__{rank}_0.distcp"
    placed: list[PlacedShard] = []
    with (folder / name).open("wb", buffering=0) as file:
        stream = _Digested(file, moved)
        try:
            for fqn, payload in planned.objects:
                begin = stream.tell()
                stream.write(payload)
                placed.append(PlacedShard(fqn, None, begin, stream.tell() - begin))
            for shard, copy in zip(planned.shards, copies, strict=True):
                begin = stream.tell()
                torch.save(copy, stream)  # type: ignore[arg-type]  # writes, and asks nothing else
                placed.append(PlacedShard(shard.name, shard.offset, begin, stream.tell() - begin))
        except Exception as error:
            if stream.failure is not None and stream.failure is not error:  # torch reports a write that failed by its own state
                raise stream.failure from error
            raise
        os.fsync(file.fileno())
    return Written(name, stream.tell(), stream.digest, tuple(placed))


def write_common(folder: Path, planned: Planned, common: Mapping[str, Any], reports: Iterable[Written]) -> None:
    """Write what rank 0 writes besides its shards; `asyncmoe.checkpoints.finish` syncs it."""
    assert planned.metadata is not None
    torch.save(dict(common), folder / COMMON)
    (folder / _CONFIG).write_text(json.dumps(dict(planned.format)))
    results = [
        WriteResult(index_of(one.name, one.offset), one.nbytes, _StorageInfo(report.file, one.begin, one.nbytes))
        for report in reports
        for one in report.shards
    ]
    FileSystemWriter(folder).finish(planned.metadata, [results])


def explain(config: Config, step: int, error: BaseException) -> StorageError | None:
    """Return the error for the user if storage is the cause of a failed save. Call it before anything is removed: torch gives no reason, so
    this checks the disk."""
    newest = checkpoints.newest(config.run.dir)
    then = f"the run resumes from {newest.name}" if newest else "the run starts from step 0"
    return storage.explain(error, f"checkpoint of step {step}", checkpoints.temporary(config.run.dir, step), then)


class _Digested(io.RawIOBase):
    """Writes to a file all of what it is given, and keeps the CRC-32C of it."""

    def __init__(self, file: io.FileIO, moved: Callable[[], None]) -> None:
        super().__init__()
        self._file, self._moved = file, moved
        self._place = self.digest = 0
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        count = len(left)
        self.digest = crc32c(left, self.digest)
        try:
            while left:
                written = self._file.write(left[:_PIECE_BYTES])
                left = left[written:]
                self._moved()
        except OSError as error:
            self.failure = error
            raise
        self._place += count
        return count


_PIECE_BYTES = 64 << 20
"""Most bytes of a write: a disk that has taken so many is not hung."""
