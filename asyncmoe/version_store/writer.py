"""Write a version: each rank its share, from its own memory; then one of them the manifest.

A writer that knows what it wrote last writes an object as a delta: which elements changed, and to what. An object is written whole where
that pays more, and from time to time, so that whoever reads it from the beginning reads little more than it. It comes with the delta too
then, for those who have what was there before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import InvariantBroken, LayoutError
from asyncmoe.reshard.chunks import Chunks, cut_boxes
from asyncmoe.reshard.delta_digest import BLOCK_BYTES, WORD, host_addresses
from asyncmoe.reshard.delta_format import FRAME_BYTES, HEADER_BYTES, DeltaHeader, seal
from asyncmoe.reshard.memory import Array
from asyncmoe.reshard.plan import WIRE_OFFSET
from asyncmoe.reshard.programs import Scales, message_program, scales_of
from asyncmoe.reshard.table import Tensors
from asyncmoe.version_store.geometry import Geometry, table_of
from asyncmoe.version_store.lanes import LANES, each
from asyncmoe.version_store.manifest import StoredDelta, StoredObject, VersionId, VersionManifest
from asyncmoe.version_store.share import RankShare
from asyncmoe.version_store.slab_table import SlabTable
from asyncmoe.version_store.store import VersionStore

LARGEST_DELTAS = 0.5
"""The deltas of an object together take at most this share of its bytes."""


@dataclass(frozen=True)
class ShareSize:
    """What a rank wrote of a version.

    Attributes:
        nbytes: bytes of the objects and deltas that the version before did not have.
        changed: elements whose stored bits changed since the version before; None: some were not compared.
        elements: all elements.
    """

    nbytes: int
    changed: int | None
    elements: int


@dataclass(frozen=True, eq=False)
class _Coded:
    """What changed in an object.

    Attributes:
        frames: of each slab, uint8; empty where nothing changed.
        slabs: the digests that the slabs then have.
    """

    frames: tuple[np.ndarray, ...]
    slabs: tuple[int, ...]
    changed: int

    @property
    def parts(self) -> tuple[int, ...]:
        return tuple(map(len, self.frames))


_Written = tuple[StoredObject, int, int | None]
"""An object, the bytes written for it, the changed elements."""


class ShareWriter:
    """Writes the share of one rank, of any number of versions.

    Args:
        full_every: an object is written whole at the latest when it has changed so many times; 1: always, without deltas. Otherwise the
            writer keeps the bytes of the whole share (`base_bytes`), and the first version is whole.
        lanes: objects under way at a time; without deltas each takes the memory of the largest, with them that of what changed.
        threads: threads that pack an object.
    """

    def __init__(
        self, tensors: Tensors, share: RankShare, store: VersionStore, *, full_every: int = 1, lanes: int = LANES, threads: int = 1
    ) -> None:
        if full_every < 1:
            raise LayoutError("full_every", got=full_every, expected="at least 1")
        self._share, self._store, self._full_every, self._threads = share, store, full_every, threads
        scales = scales_of(share.storages, [share.copies])
        self._storages = {**share.storages, **scales.storages}
        self._table = SlabTable(tensors, table_of(tensors, [share.slabs]), range(len(share.slabs.dtypes)))
        self._pack = _packing(share, self._table, scales)
        sizes = share.slabs.object_bytes
        self._lanes = max(1, min(lanes, len(sizes)))
        self.base_bytes = int(sizes.sum()) if full_every > 1 else 0
        """Bytes of memory that the writer keeps."""
        self.buffer_bytes = 0 if full_every > 1 else self._lanes * int(sizes.max(initial=0))
        """Bytes of memory for whole objects that a version takes while it is written."""
        self._base = np.zeros(0, np.uint8)
        self._begins = np.cumsum([0, *sizes.tolist()])
        self._last: tuple[StoredObject, ...] | None = None
        self.size = ShareSize(0, None, 0)
        """What the last version took."""

    def forget(self) -> None:
        """Write the next version whole, and read what of it is there already: what was written last may be missing or damaged."""
        self._last = None

    def write(self, arrays: Mapping[str, Array]) -> tuple[StoredObject, ...]:
        """Write the share from arrays by the names of the rank's storages, in host memory; return when it is in the store. They are read
        only during this call. If it fails, the next version is whole.

        Raises:
            LayoutError: an array is missing, does not match its storage, or is not in host memory.
            InvariantBroken: the bytes that were written last changed in memory.
            StorageError, WaitTimeout, AsyncmoeError: see `StoreFiles`; some of the objects may then be there, without a manifest.
        """
        sources = host_addresses(self._storages, arrays, f"rank {self._share.rank}: source array", write=False)
        last, self._last = self._last, None
        if last is None:
            self._base = np.zeros(self.base_bytes, np.uint8)  # a write of the former one that did not end in time may still read that
        room = _Room(self._lanes, self.buffer_bytes // self._lanes)

        def write(number: int) -> _Written:
            before = None if last is None else last[number]
            if self.base_bytes:
                return self._object(number, self._base[self._begins[number] : self._begins[number + 1]], sources, before)
            with room.taken(int(self._share.slabs.object_bytes[number])) as data:
                return self._object(number, data, sources, before)

        found = each(write, len(self._share.slabs.object_bytes), self._lanes, "version store")
        changes = [one[2] for one in found]
        compared = None if None in changes else sum(change for change in changes if change is not None)
        elements = int(self._share.slabs.element_count)
        self.size = ShareSize(sum(one[1] for one in found), compared, elements)
        objects = tuple(one[0] for one in found)
        self._last = objects
        return objects

    def _object(self, number: int, data: np.ndarray, sources: np.ndarray, before: StoredObject | None) -> _Written:
        """Write an object, `before` in the last version. `data` then has what was written; with deltas it has what `before` says first."""
        slabs = self._share.slabs
        inside = range(int(slabs.objects[number]), int(slabs.objects[number + 1]))
        addresses = [int(data.ctypes.data) + int(slabs.slab_offsets[slab]) for slab in inside]
        most = int(LARGEST_DELTAS * len(data))
        coded = self._coded(inside, addresses, sources, before, most) if self.base_bytes and before is not None else None
        if before is None or coded is None:
            digests = tuple(self._fill(slab, sources, at) for slab, at in zip(inside, addresses, strict=True))
            digest = self._store.put(data.data, "" if before is None else before.digest)
            return StoredObject(digest, len(data), digests), len(data), None
        if not any(coded.parts):
            return before, 0, 0
        self._advance(inside, addresses, coded, before)
        delta = StoredDelta(self._store.put(np.concatenate(coded.frames).data), coded.parts)
        together = sum(one.nbytes for one in before.chain) + delta.nbytes
        if len(before.chain) + 1 < self._full_every and together <= LARGEST_DELTAS * len(data):
            deltas = (*before.deltas, delta)
            return StoredObject(before.digest, before.nbytes, coded.slabs, deltas, before.former), delta.nbytes, coded.changed
        made = StoredObject(self._store.put(data.data), len(data), coded.slabs, (delta,), before.state)
        return made, len(data) + delta.nbytes, coded.changed

    def _fill(self, slab: int, sources: np.ndarray, address: int) -> int:
        return self._table.fill(self._pack, slab, sources, address, self._threads)

    def _coded(self, inside: range, addresses: Sequence[int], sources: np.ndarray, before: StoredObject, most: int) -> _Coded | None:
        """Code what changed since `before`, which lies at the addresses; None if it takes more than `most` bytes."""
        frames, after, total, changes = list[np.ndarray](), list[int](), 0, 0
        for slab, address, old in zip(inside, addresses, before.slabs, strict=True):
            frame, difference, changed = self._table.encode(self._pack, slab, sources, address, self._threads)
            new = (old + difference) & WORD
            if not changed:
                frame = frame[:0]
            else:
                # Which versions it lies between stands in the manifest, and what it changes in its digests.
                place = self._share.slabs.identity, slab, len(self._share.slabs.dtypes), 0, 0
                seal(frame, DeltaHeader(*place, old, new, len(frame) - FRAME_BYTES))
            total, changes = total + len(frame), changes + changed
            if total > most:
                return None
            frames.append(frame)
            after.append(new)
        return _Coded(tuple(frames), tuple(after), changes)

    def _advance(self, inside: range, addresses: Sequence[int], coded: _Coded, before: StoredObject) -> None:
        """Make of what was written last what is written now."""
        for slab, address, frame, old, new in zip(inside, addresses, coded.frames, before.slabs, coded.slabs, strict=True):
            if not len(frame):
                continue
            payload = int(frame.ctypes.data) + HEADER_BYTES, len(frame) - FRAME_BYTES
            if (old + self._table.apply(slab, *payload, address, self._threads)) & WORD != new:
                raise InvariantBroken(f"rank {self._share.rank}: slab {slab} of the version that was written last changed in memory")


class _Room:
    """Buffers for objects under way."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._free: SimpleQueue[np.ndarray] = SimpleQueue()
        for _ in range(count):
            self._free.put(np.zeros(nbytes, np.uint8))

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[np.ndarray]:
        """Lend zeros."""
        buffer = self._free.get()
        try:
            buffer[:nbytes] = 0  # between slabs
            yield buffer[:nbytes]
        except BaseException:
            buffer = np.zeros(len(buffer), np.uint8)  # a write that did not end in time may still read the former one
            raise
        finally:
            self._free.put(buffer)


def _packing(share: RankShare, table: SlabTable, scales: Scales) -> _C.Program:
    """Return the program that packs each slab of a share as a message, in the rows of its table."""
    copies = cut_boxes(share.copies, BLOCK_BYTES)
    copies[:, WIRE_OFFSET] = table.offsets
    return message_program(Chunks(share.rank, share.rank, copies, table.firsts, ()), "destination", scales)


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
