"""The checkpoint of an iteration among those that Megatron-LM or Megatron-Bridge has saved, and parts of its tensors.

Source: `get_checkpoint_name` and `read_metadata` of Megatron-LM's training/checkpointing.py; `CheckpointingConfig` of megatron/core 0.16.1
(dist_checkpointing/core.py).
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from asyncmoe.errors import DataError
from asyncmoe.platform.megatron import reader
from asyncmoe.reshard.layout import Box

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
FORMAT_FILE = "metadata.json"
FORMAT = "torch_dist"
_EXPECTED = f"a whole {FORMAT} checkpoint of Megatron-LM or Megatron-Bridge"
_HINT = f"--iteration N takes another one; Megatron-LM converts other formats: --ckpt-convert-format {FORMAT} --ckpt-convert-save OUT"
_KEPT = 2
"""Boxes that stay in memory: both matrices of a layer's experts, which are asked for one expert at a time."""


def find(checkpoint: Path, iteration: int | None = None) -> Path:
    """Return the folder of an iteration.

    Args:
        checkpoint: it, or the folder that Megatron saved to (`--save`).
        iteration: its number; None: the one that Megatron would load.

    Raises:
        DataError: there is none, it is of another format, or is not whole.
    """
    found = checkpoint
    if iteration is not None:
        found = checkpoint / f"iter_{iteration:07d}"
    elif (tracker := checkpoint / TRACKER).is_file():
        word = tracker.read_text(errors="replace").strip()[:80]
        found = checkpoint / (RELEASE if word == RELEASE else f"iter_{word:0>7}")
    try:  # Megatron writes this file last
        backend = json.loads((found / FORMAT_FILE).read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(str(found), got=f"{type(error).__name__}: {error}"[:200], expected=_EXPECTED, hint=_HINT) from error
    if backend != FORMAT:
        raise DataError(str(found), got=f"format {backend!r}"[:100], expected=_EXPECTED, hint=_HINT)
    return found


class CheckpointTensors:
    """The tensors of a checkpoint, read by torch. A tensor is a grid of shards that the ranks of the run wrote.

    Attributes:
        stored: what there is, by name.

    Raises:
        DataError: `.metadata` is missing or damaged, or names what it must not.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._reader = folder, FileSystemReader(folder)
        try:
            found = reader.metadata(folder / reader.METADATA_FILE)
        except reader.Unreadable as error:
            raise DataError(str(folder), got=str(error), expected=_EXPECTED, hint=_HINT) from error
        self._reader.set_up_storage_reader(found, True)
        self.stored = {name: one for name, one in found.state_dict_metadata.items() if isinstance(one, TensorStorageMetadata)}
        self._last: dict[tuple[str, Box], torch.Tensor] = {}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor, as it is stored; do not change it.

        Raises:
            DataError: a shard is missing or damaged, or shards leave a part of the box out.
        """
        if (name, box) not in self._last:
            while len(self._last) >= _KEPT:
                del self._last[next(iter(self._last))]
            self._last[name, box] = self._read(name, box)
        return self._last[name, box]

    def _read(self, name: str, box: Box) -> torch.Tensor:
        stored = self.stored[name]
        made = torch.empty(box.extent, dtype=stored.properties.dtype)
        items = create_read_items_for_chunk_list(name, stored, [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.extent))])
        if (there := sum(prod(item.lengths) for item in items)) != box.size:
            raise self._fault(name, f"{there} of the {box.size} elements of {box}")
        try:
            self._reader.read_data(LoadPlan(items), _Into(made)).wait()
        except Exception as error:  # bytes from a stranger may make a parser raise anything
            raise self._fault(name, f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]) from error
        return made

    def _fault(self, name: str, got: str) -> DataError:
        return DataError(f"{self._folder}: tensor {name}", got=got, expected=_EXPECTED, hint=_HINT)


class _Into(DefaultLoadPlanner):
    """Has torch read into one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        return self._tensor
