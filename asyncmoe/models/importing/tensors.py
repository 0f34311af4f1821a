"""Reads parts of tensors from the shards of a `torch_dist` checkpoint, a shard at a time.

A tensor is a grid of shards that the ranks of the run wrote. `.metadata` says where in the tensor each lies, and where in which file; there
it is a file of `torch.save` of its own. Source: `FileSystemReader.read_data` of torch/distributed/checkpoint/filesystem.py (torch 2.13).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from asyncmoe.errors import DataError
from asyncmoe.platform.megatron import reader
from asyncmoe.reshard.layout import Box

_OURS = 1 << 16
"""Room for what `torch.save` writes besides a shard's elements."""
_KEPT = 2
"""Shards that stay in memory: gate and up of the same experts."""


@dataclass(frozen=True)
class StoredShard:
    """A shard on disk: its box in the tensor, and its bytes in a file."""

    box: Box
    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[StoredShard, ...]


class _Indexed:
    """A tensor's shards by their place in the leading dimensions that are cut into single entries, as stacked layers and experts are."""

    def __init__(self, stored: StoredTensor) -> None:
        self.stored = stored
        extents = [shard.box.extent for shard in stored.shards]
        self._cut = next((k for k, sizes in enumerate(zip(*extents, strict=True)) if set(sizes) != {1}), len(stored.shape))
        self._at: dict[tuple[int, ...], list[StoredShard]] = {}
        for shard in stored.shards:
            self._at.setdefault(shard.box.start[: self._cut], []).append(shard)

    def near(self, box: Box) -> Sequence[StoredShard]:
        """Return shards among which are all that overlap a box."""
        if all(size == 1 for size in box.extent[: self._cut]):
            return self._at.get(box.start[: self._cut], ())
        return self.stored.shards


class CheckpointTensors:
    """The tensors of a checkpoint by name.

    Raises:
        DataError: `.metadata` is damaged, or names what it must not.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            found = reader.metadata(folder / reader.METADATA_FILE)
        except reader.Unreadable as error:
            raise DataError(str(folder), got=str(error), expected="the list of tensors that torch writes") from error
        self._stored: dict[str, _Indexed] = {}
        self._last: dict[tuple[str, int], torch.Tensor] = {}
        self._places = found.storage_data
        self._found = {name: one for name, one in found.state_dict_metadata.items() if isinstance(one, TensorStorageMetadata)}

    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return frozenset(self._found)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(self._found[name].size)

    def stored(self, name: str) -> StoredTensor:
        """Return a tensor's places.

        Raises:
            DataError: a shard has no place, lies in a file that is missing or too short, or is stored in a way that torch alone reads.
        """
        return self._indexed(name).stored

    def _indexed(self, name: str) -> _Indexed:
        if name not in self._stored:
            self._stored[name] = _Indexed(self._listed(name))
        return self._stored[name]

    def _listed(self, name: str) -> StoredTensor:
        one = self._found[name]
        shards = []
        for chunk in one.chunks:
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            place = self._places.get(MetadataIndex(name, chunk.offsets))
            if place is None:
                raise self._fault(name, f"no place of its shard {box}")
            if getattr(place, "transform_descriptors", None):
                raise self._fault(name, f"a shard written through {place.transform_descriptors}")
            shards.append(StoredShard(box, place.relative_path, place.offset, place.length))
        return StoredTensor(name, self.shape(name), one.properties.dtype, tuple(shards))

    def check(self, names: Sequence[str]) -> None:
        """Find out, without reading shards, whether tensors are whole.

        Raises:
            DataError: names the first fault; see `stored`.
        """
        sizes: dict[str, int] = {}
        for name in names:
            stored = self.stored(name)
            if sum(shard.box.size for shard in stored.shards) != prod(stored.shape):
                raise self._fault(name, f"shards of {sum(shard.box.size for shard in stored.shards)} elements of {prod(stored.shape)}")
            for shard in stored.shards:
                if shard.file not in sizes:
                    path = self._folder / shard.file
                    sizes[shard.file] = path.stat().st_size if path.is_file() else -1
                if sizes[shard.file] < shard.begin + shard.length:
                    size = f"{shard.file} of {sizes[shard.file]} bytes" if sizes[shard.file] >= 0 else f"no {shard.file}"
                    raise self._fault(name, f"{size}, where its bytes {shard.begin} to {shard.begin + shard.length} are")
                if shard.length > shard.box.size * stored.dtype.itemsize + _OURS:
                    raise self._fault(name, f"{shard.length} bytes of a shard of {shard.box.size} elements")

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor, as it is stored.

        Raises:
            DataError: a shard is damaged, or shards leave a part of the box out.
        """
        indexed = self._indexed(name)
        stored = indexed.stored
        made = torch.empty(box.extent, dtype=stored.dtype)
        filled = 0
        for shard, common in _overlapping(indexed.near(box), box):
            value = self._shard(stored, shard)
            made[_within(common, box)] = value[_within(common, shard.box)]
            filled += common.size
        if filled != box.size:
            raise self._fault(name, f"{filled} of the {box.size} elements of {box}")
        return made

    def _shard(self, stored: StoredTensor, shard: StoredShard) -> torch.Tensor:
        """Read a shard; the last ones stay, because one may have several experts' weights."""
        if (key := (shard.file, shard.begin)) not in self._last:
            while len(self._last) >= _KEPT:
                del self._last[next(iter(self._last))]
            self._last[key] = self._read_shard(stored, shard)
        return self._last[key]

    def _read_shard(self, stored: StoredTensor, shard: StoredShard) -> torch.Tensor:
        with (self._folder / shard.file).open("rb") as file:
            file.seek(shard.begin)
            content = file.read(shard.length)
        try:
            value = reader.weights(io.BytesIO(content), shard.file)
        except reader.Unreadable as error:
            raise self._fault(stored.name, str(error)) from error
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != shard.box.extent or value.dtype != stored.dtype:
            raise self._fault(stored.name, f"another shard in {shard.file}")
        return value

    def _fault(self, name: str, got: str) -> DataError:
        return DataError(f"{self._folder}: tensor {name}", got=got, expected="a checkpoint that is whole", hint="take another iteration")


def _overlapping(shards: Sequence[StoredShard], box: Box) -> Iterator[tuple[StoredShard, Box]]:
    """Yield the shards that have a part of a box, with that part."""
    for shard in shards:
        first = tuple(map(max, shard.box.start, box.start))
        last = tuple(min(a + n, b + m) for a, n, b, m in zip(shard.box.start, shard.box.extent, box.start, box.extent, strict=True))
        if all(a < b for a, b in zip(first, last, strict=True)):
            yield shard, Box(first, tuple(b - a for a, b in zip(first, last, strict=True)))


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the indices of a box in a tensor that is `outer`."""
    return tuple(slice(a - b, a - b + n) for a, b, n in zip(box.start, outer.start, box.extent, strict=True))
