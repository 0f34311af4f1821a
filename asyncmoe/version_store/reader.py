"""Read a rank's shard of a version: only its own ranges, each verified before it is used, and the whole shard afterwards."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from asyncmoe.errors import DataError, WaitTimeout
from asyncmoe.reshard.delta_digest import WORD, host_addresses, shard_digest
from asyncmoe.reshard.layout import RankLayout
from asyncmoe.reshard.memory import Array
from asyncmoe.version_store.digests import SlabDigests, padding_digest
from asyncmoe.version_store.geometry import Geometry
from asyncmoe.version_store.lanes import LANES, each
from asyncmoe.version_store.manifest import VersionManifest, digest_of
from asyncmoe.version_store.read_plan import Range, plan_read
from asyncmoe.version_store.share import OBJECT_BYTES
from asyncmoe.version_store.store import VersionStore


class ShardReader:
    """Reads the shard of one rank, of any number of versions of one geometry.

    Args:
        range_bytes: bound of what is read at a time; a larger slab is read at once.
        lanes: ranges under way at a time.
        threads: threads that copy and digest a range.

    Attributes:
        plan: what is read of every version; `plan.nbytes` of it.

    Raises:
        LayoutError: see `plan_read`.
    """

    def __init__(
        self,
        store: VersionStore,
        geometry: Geometry,
        layout: RankLayout,
        *,
        range_bytes: int = OBJECT_BYTES,
        lanes: int = LANES,
        threads: int = 1,
    ) -> None:
        self._store, self._geometry, self._lanes, self._threads = store, geometry, lanes, threads
        self.plan = plan_read(geometry, layout, range_bytes=range_bytes)
        self._digests = SlabDigests(geometry.tensors, geometry.table, self.plan.slabs)
        self._place = {slab: i for i, slab in enumerate(self.plan.slabs)}

    def read(self, manifest: VersionManifest, arrays: Mapping[str, Array], *, timeout_s: float = 300.0) -> int:
        """Read a version into arrays by the names of the layout's storages, in host memory; return the bytes read.

        After an error the arrays may hold a part of the version.

        Raises:
            DataError: an object is missing, cut off or altered, or the manifest does not fit the geometry; names the object.
            LayoutError: an array is missing, does not match its storage, or is not in host memory.
            WaitTimeout: the version was not read in time.
            AsyncmoeError: see `StoreFiles`.
        """
        self._check(manifest)
        until = time.monotonic() + timeout_s
        destinations = host_addresses(self.plan.storages, arrays, f"rank {self.plan.layout.rank}: array", write=True)

        def read(number: int) -> int:
            if time.monotonic() > until:
                raise WaitTimeout(self._store.files.shown, f"{manifest.version} to be read", timeout_s)
            return self._range(number, manifest, destinations)

        found = sum(each(read, len(self.plan.ranges), self._lanes, "version store"))
        if self.plan.zeros is not None:
            self.plan.zeros.run(0, np.zeros(0, np.int64), destinations, self._threads)
        self._verify(manifest, arrays)
        return found

    def _range(self, number: int, manifest: VersionManifest, destinations: np.ndarray) -> int:
        one = self.plan.ranges[number]
        stored = manifest.ranks[one.rank][one.object]
        data = self._store.files.read(stored.name, one.begin, one.nbytes)
        where = f"{self._store.files.shown}/{stored.name} of {manifest.version}"
        if data is None or len(data) != one.nbytes:
            got = "no such object" if data is None else f"{len(data)} bytes at {one.begin}"
            raise DataError(where, got=got, expected=f"{one.nbytes} bytes at {one.begin} of {stored.nbytes}")
        if one.nbytes == stored.nbytes and digest_of(data) != stored.digest:
            raise DataError(where, got="bytes of another digest than its name", expected="the object as it was written")
        base = np.frombuffer(data, np.uint8).ctypes.data
        sources = np.zeros(len(self.plan.slabs), np.int64)
        for slab, offset in zip(range(one.first, one.last), one.offsets, strict=True):
            sources[self._place[slab]] = base + offset
            if self._digests.read(slab, base + offset, self._threads) != stored.slabs[self._local(one, slab)]:
                what = f"an altered object: slab {self._local(one, slab)} has another digest"
                raise DataError(where, got=what, expected="the object as it was written")
        self.plan.program.run(number, sources, destinations, self._threads)
        return len(data)

    def _local(self, one: Range, slab: int) -> int:
        """Return the position of a slab in its object."""
        return slab - int(self._geometry.first_slabs[one.rank]) - int(self._geometry.ranks[one.rank].objects[one.object])

    def _check(self, manifest: VersionManifest) -> None:
        """Refuse a manifest whose objects are not the geometry's."""
        wanted = [list(zip(slabs.object_bytes.tolist(), np.diff(slabs.objects).tolist(), strict=True)) for slabs in self._geometry.ranks]
        if [[(one.nbytes, len(one.slabs)) for one in rank] for rank in manifest.ranks] != wanted:
            where = f"{self._store.files.shown}/{manifest.version.name}"
            raise DataError(where, got="objects of other sizes than its geometry's", expected="those of its geometry")

    def _verify(self, manifest: VersionManifest, arrays: Mapping[str, Array]) -> None:
        """Compare the digest of the shard, read from its memory, with the sum of what the manifest says."""
        if not self.plan.each_once:
            return
        slabs = sum(
            manifest.ranks[one.rank][one.object].slabs[self._local(one, slab)]
            for one in self.plan.ranges
            for slab in range(one.first, one.last)
        )
        expected = (slabs + self._padding) & WORD
        found = shard_digest(self._geometry.tensors.shapes, self.plan.layout, arrays, threads=self._threads)
        if found != expected:
            where = f"rank {self.plan.layout.rank}: its shard of {manifest.version}"
            raise DataError(where, got=f"digest {found:016x}", expected=f"{expected:016x}, as the manifest says")

    @cached_property
    def _padding(self) -> int:
        return padding_digest(self._geometry.tensors, self.plan.layout)
