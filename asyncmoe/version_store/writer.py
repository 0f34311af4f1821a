"""Write a version: each rank its share, from its own memory; then one of them the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from queue import SimpleQueue

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError
from asyncmoe.reshard.delta_digest import host_addresses
from asyncmoe.reshard.memory import Array
from asyncmoe.reshard.programs import local_rows, scales_of
from asyncmoe.reshard.table import Tensors
from asyncmoe.version_store.digests import SlabDigests
from asyncmoe.version_store.geometry import Geometry, table_of
from asyncmoe.version_store.lanes import LANES, each
from asyncmoe.version_store.manifest import StoredObject, VersionId, VersionManifest
from asyncmoe.version_store.share import RankShare
from asyncmoe.version_store.store import VersionStore


class ShareWriter:
    """Writes the share of one rank, of any number of versions.

    Args:
        lanes: objects under way at a time; each takes the memory of the largest.
        threads: threads that copy an object.
    """

    def __init__(self, tensors: Tensors, share: RankShare, store: VersionStore, *, lanes: int = LANES, threads: int = 1) -> None:
        self._share, self._store, self._threads = share, store, threads
        scales = scales_of(share.storages, [share.copies])
        self._storages = {**share.storages, **scales.storages}
        rows, casts = local_rows([share.copies], scales)
        self._program = _C.Program(rows, share.slabs.firsts[share.slabs.objects], "none", casts)
        self._digests = SlabDigests(tensors, table_of(tensors, [share.slabs]), range(len(share.slabs.dtypes)))
        self._objects = len(share.slabs.object_bytes)
        self._lanes = max(1, min(lanes, self._objects))
        self.buffer_bytes = self._lanes * int(share.slabs.object_bytes.max(initial=0))
        """Bytes of memory that a version takes while it is written."""

    def write(self, arrays: Mapping[str, Array]) -> tuple[StoredObject, ...]:
        """Write the share from arrays by the names of the rank's storages, in host memory; return when it is in the store. They are read
        only during this call.

        Raises:
            LayoutError: an array is missing, does not match its storage, or is not in host memory.
            StorageError, WaitTimeout, AsyncmoeError: see `StoreFiles`; some of the objects may then be there, without a manifest.
        """
        sources = host_addresses(self._storages, arrays, f"rank {self._share.rank}: source array", write=False)
        largest = int(self._share.slabs.object_bytes.max(initial=0))
        buffers: SimpleQueue[np.ndarray] = SimpleQueue()
        for _ in range(self._lanes):
            buffers.put(np.zeros(largest, np.uint8))

        def write(number: int) -> StoredObject:
            buffer = buffers.get()
            try:
                return self._object(number, buffer, sources)
            finally:
                buffers.put(buffer)

        return tuple(each(write, self._objects, self._lanes, "version store"))

    def _object(self, number: int, buffer: np.ndarray, sources: np.ndarray) -> StoredObject:
        slabs = self._share.slabs
        data = buffer[: int(slabs.object_bytes[number])]
        data[:] = 0  # between slabs
        base = data.ctypes.data
        self._program.run(number, sources, np.array([base], np.uint64).view(np.int64), self._threads)
        inside = range(int(slabs.objects[number]), int(slabs.objects[number + 1]))
        digests = tuple(self._digests.read(slab, base + int(slabs.slab_offsets[slab]), self._threads) for slab in inside)
        return StoredObject(self._store.put(data.data), len(data), digests)


def publish(store: VersionStore, version: VersionId, geometry: Geometry, parts: Sequence[tuple[StoredObject, ...]]) -> str:
    """Make a version of what all ranks have written; return the digest of its manifest. Called by one rank, after all have written.

    Args:
        parts: of each rank of the geometry, what `ShareWriter.write` returned.

    Raises:
        LayoutError: the parts are not what the geometry says.
        StorageError, WaitTimeout, AsyncmoeError: see `StoreFiles`; the version does not exist.
    """
    if len(parts) != len(geometry.ranks):
        raise LayoutError(f"{version}", got=f"parts of {len(parts)} ranks", expected=f"of {len(geometry.ranks)}")
    for i, (part, slabs) in enumerate(zip(parts, geometry.ranks, strict=True)):
        got = [(one.nbytes, len(one.slabs)) for one in part]
        expected = list(zip(slabs.object_bytes.tolist(), np.diff(slabs.objects).tolist(), strict=True))
        if got != expected:
            raise LayoutError(
                f"{version}: rank number {i}", got="objects of other sizes than its geometry's", expected="the same plan on all"
            )
    manifest = VersionManifest(store.run, version, store.put(geometry.encode()), tuple(parts))
    return store.publish(manifest)
