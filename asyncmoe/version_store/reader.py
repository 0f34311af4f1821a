"""Read a rank's shard of a version: only its own ranges, each verified before it is used, and the whole shard afterwards.

What the rank has in memory already is not read again: of a former version only what changed since, otherwise objects that were written
whole and what changed in them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from asyncmoe.errors import DataError, WaitTimeout
from asyncmoe.reshard.delta_digest import WORD, host_addresses, shard_digest
from asyncmoe.reshard.layout import RankLayout
from asyncmoe.reshard.memory import Array
from asyncmoe.version_store.delta_reader import apply_delta, frames_of
from asyncmoe.version_store.geometry import Geometry
from asyncmoe.version_store.lanes import LANES, each
from asyncmoe.version_store.manifest import StoredDelta, StoredObject, VersionManifest, digest_of
from asyncmoe.version_store.read_plan import Range, plan_read
from asyncmoe.version_store.share import OBJECT_BYTES
from asyncmoe.version_store.slab_table import SlabTable, padding_digest
from asyncmoe.version_store.store import VersionStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class HeldVersion:
    """A version that a rank has in memory, as far as it knows: what is used of it is verified.

    Attributes:
        arrays: by the names of its layout's storages, in host memory.
    """

    manifest: VersionManifest
    arrays: Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class _Reading:
    """A version that is being read.

    Attributes:
        destinations, sources: addresses of the rank's storages, to write and, of `held`, to read.
        held: what is held of the same geometry.
        refused: why ranges of it were read from the beginning.
    """

    manifest: VersionManifest
    destinations: np.ndarray
    held: VersionManifest | None
    sources: np.ndarray
    until: float
    timeout_s: float
    refused: list[str] = field(default_factory=list)


class ShardReader:
    """Reads the shard of one rank, of any number of versions of one geometry.

    Args:
        range_bytes: bound of what is read at a time; a larger slab is read at once.
        lanes: ranges under way at a time.
        threads: threads that copy and digest a range.

    Attributes:
        plan: what is read of every version; `plan.nbytes` of objects that are read whole.

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
        self._table = SlabTable(geometry.tensors, geometry.table, self.plan.slabs)
        self._place = {slab: i for i, slab in enumerate(self.plan.slabs)}

    def read(
        self, manifest: VersionManifest, arrays: Mapping[str, Array], *, held: HeldVersion | None = None, timeout_s: float = 300.0
    ) -> int:
        """Read a version into arrays by the names of the layout's storages, in host memory; return the bytes read.

        After an error the arrays may hold a part of the version.

        Args:
            held: a version in other arrays, of which only what changed since is read, where deltas lead from it to this one. What does
                not fit is read from the beginning, with a warning.

        Raises:
            DataError: an object is missing, cut off or altered, or the manifest does not fit the geometry; names the object.
            LayoutError: an array is missing, does not match its storage, or is not in host memory.
            WaitTimeout: the version was not read in time.
            AsyncmoeError: see `StoreFiles`.
        """
        self._check(manifest)
        until = time.monotonic() + timeout_s
        what = f"rank {self.plan.layout.rank}: array"
        destinations, sources = host_addresses(self.plan.storages, arrays, what, write=True), np.zeros(0, np.int64)
        former = None
        if held is not None and self.plan.gather is not None and held.manifest.geometry == manifest.geometry:
            self._check(held.manifest)
            former, sources = held.manifest, host_addresses(self.plan.storages, held.arrays, what, write=False)
        reading = _Reading(manifest, destinations, former, sources, until, timeout_s)
        try:
            found = sum(each(lambda number: self._range(number, reading), len(self.plan.ranges), self._lanes, "version store"))
        finally:
            if reading.refused:
                more = f"; {len(reading.refused) - 1} more" if len(reading.refused) > 1 else ""
                log.warning("%s%s; reading them from the beginning", reading.refused[0], more)
        if self.plan.zeros is not None:
            self.plan.zeros.run(0, np.zeros(0, np.int64), destinations, self._threads)
        self._verify(manifest, arrays)
        return found

    def _range(self, number: int, reading: _Reading) -> int:
        """Make a range of the version in memory; return the bytes read."""
        one = self.plan.ranges[number]
        stored = reading.manifest.ranks[one.rank][one.object]
        known = None if reading.held is None else reading.held.ranks[one.rank][one.object]
        deltas = None if known is None else stored.since(known.state)
        if known is not None and deltas is not None:
            try:
                return self._changed(number, reading, known, deltas)
            except DataError as error:
                reading.refused.append(str(error))
        whole = self._whole(one, stored, reading)
        return len(whole) + self._made(number, reading, whole.copy() if stored.chain else whole, stored.chain)

    def _changed(self, number: int, reading: _Reading, known: StoredObject, deltas: tuple[StoredDelta, ...]) -> int:
        """Make a range of what is held of it; return the bytes read."""
        one, gather = self.plan.ranges[number], self.plan.gather
        assert gather is not None
        data = np.empty(one.nbytes, np.uint8)
        gather.run(number, reading.sources, self._addresses(one, data), self._threads)
        for slab, digest in zip(range(one.first, one.last), self._digests(one, data), strict=True):
            if digest != known.slabs[self._local(one, slab)]:
                what = f"rank {self.plan.layout.rank}: slab {self._local(one, slab)} of {known.name} in its memory"
                expected = f"{known.slabs[self._local(one, slab)]:016x}, as it was read"
                raise DataError(what, got=f"digest {digest:016x}", expected=expected)
        return self._made(number, reading, data, deltas)

    def _whole(self, one: Range, stored: StoredObject, reading: _Reading) -> np.ndarray:
        """Read a range of an object that was written whole: uint8[its bytes], not to be written."""
        where = self._where(stored.name, reading)
        data = self._bytes(stored.name, one.begin, one.nbytes, stored.nbytes, reading)
        if one.nbytes == stored.nbytes and digest_of(data) != stored.digest:
            raise DataError(where, got="bytes of another digest than its name", expected="the object as it was written")
        return np.frombuffer(data, np.uint8)

    def _made(self, number: int, reading: _Reading, data: np.ndarray, deltas: tuple[StoredDelta, ...]) -> int:
        """Apply deltas to a range, verify it, and put it where it belongs; return the bytes read for that."""
        one = self.plan.ranges[number]
        stored = reading.manifest.ranks[one.rank][one.object]
        digests, found = self._digests(one, data), 0
        first = self._local(one, one.first)
        for delta in deltas:
            where = self._where(delta.name, reading)
            bounds = [self._table.bound(slab) for slab in range(one.first, one.last)]
            begin, nbytes = frames_of(delta, first, bounds, where)
            if not nbytes:
                continue  # nothing changed here
            coded = self._bytes(delta.name, begin, nbytes, delta.nbytes, reading)
            if nbytes == delta.nbytes and digest_of(coded) != delta.digest:
                raise DataError(where, got="bytes of another digest than its name", expected="the delta as it was written")
            apply_delta(self._table, self._geometry, one, delta.parts[first:], np.frombuffer(coded, np.uint8), data, digests, where)
            found += nbytes
        for i, digest in enumerate(digests):
            if digest != stored.slabs[first + i]:
                what = f"an altered object: slab {first + i} has another digest"
                raise DataError(self._where(stored.name, reading), got=what, expected="the object as it was written")
        sources = self._addresses(one, data)
        self.plan.program.run(number, sources, reading.destinations, self._threads)
        return found

    def _bytes(self, name: str, begin: int, nbytes: int, whole: int, reading: _Reading) -> bytes:
        if time.monotonic() > reading.until:
            raise WaitTimeout(self._store.files.shown, f"{reading.manifest.version} to be read", reading.timeout_s)
        data = self._store.files.read(name, begin, nbytes)
        if data is None or len(data) != nbytes:
            got = "no such object" if data is None else f"{len(data)} bytes at {begin}"
            raise DataError(self._where(name, reading), got=got, expected=f"{nbytes} bytes at {begin} of {whole}")
        return data

    def _digests(self, one: Range, data: np.ndarray) -> list[int]:
        base = int(data.ctypes.data)
        slabs = range(one.first, one.last)
        return [self._table.read(slab, base + at, self._threads) for slab, at in zip(slabs, one.offsets, strict=True)]

    def _addresses(self, one: Range, data: np.ndarray) -> np.ndarray:
        """Return int64[slabs of the plan]: where those of a range lie."""
        found = np.zeros(len(self.plan.slabs), np.int64)
        at = self._place[one.first]
        found[at : at + len(one.offsets)] = int(data.ctypes.data) + np.array(one.offsets, np.int64)
        return found

    def _where(self, name: str, reading: _Reading) -> str:
        return f"{self._store.files.shown}/{name} of {reading.manifest.version}"

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
