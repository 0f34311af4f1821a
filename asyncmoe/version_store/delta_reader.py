"""Apply the deltas of an object to a range of it, as it lies in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncmoe.errors import DataError
from asyncmoe.reshard.delta_digest import WORD
from asyncmoe.reshard.delta_format import FRAME_BYTES, HEADER_BYTES, DeltaHeader, frame_fault, read_header
from asyncmoe.version_store.geometry import Geometry
from asyncmoe.version_store.manifest import StoredDelta
from asyncmoe.version_store.read_plan import Range
from asyncmoe.version_store.slab_table import SlabTable


def frames_of(delta: StoredDelta, first: int, bounds: Sequence[int], where: str) -> tuple[int, int]:
    """Return where in the file of a delta the frames of neighbouring slabs lie: offset and bytes.

    Args:
        first: position of the first of the slabs in their object.
        bounds: the most bytes that the payload of each of them takes (`SlabTable.bound`).

    Raises:
        DataError: a frame has another size than any delta of its slab; no memory is taken for it.
    """
    parts = delta.parts[first : first + len(bounds)]
    for i, (nbytes, bound) in enumerate(zip(parts, bounds, strict=True)):
        if nbytes and not FRAME_BYTES <= nbytes <= FRAME_BYTES + bound:
            expected = f"{FRAME_BYTES} to {FRAME_BYTES + bound}, or 0"
            raise DataError(f"{where}: slab {first + i}", got=f"{nbytes} bytes", expected=expected)
    return sum(delta.parts[:first]), sum(parts)


def apply_delta(
    table: SlabTable,
    geometry: Geometry,
    one: Range,
    parts: Sequence[int],
    coded: np.ndarray,
    data: np.ndarray,
    digests: list[int],
    where: str,
) -> None:
    """Change the slabs of a range.

    Args:
        parts: bytes of the frame of each slab, at least of those in the range.
        coded: uint8; their frames.
        data: uint8; the range, to be changed.
        digests: of its slabs, as they lie in `data`; they are brought up to date.

    Raises:
        DataError: a frame is cut off or altered, or changes something else than what lies in `data`, which may be partly changed then.
    """
    slabs, local = geometry.ranks[one.rank], one.first - int(geometry.first_slabs[one.rank])
    at, base = 0, int(data.ctypes.data)
    for i, nbytes in enumerate(parts[: len(one.offsets)]):
        if not nbytes:
            continue
        frame = coded[at : at + nbytes]
        at += nbytes
        name = f"{where}: slab {local + i - int(slabs.objects[one.object])}"
        header = _checked(frame, (slabs.identity, local + i, len(slabs.dtypes)), digests[i], name)
        payload = int(frame.ctypes.data) + HEADER_BYTES, header.payload
        if (wrong := table.fault(one.first + i, *payload)) is not None:
            raise DataError(name, got=wrong, expected="the delta as it was written")
        digests[i] = (digests[i] + table.apply(one.first + i, *payload, base + one.offsets[i])) & WORD
        if digests[i] != header.after:
            raise DataError(name, got=f"a delta that makes digest {digests[i]:016x}", expected=f"{header.after:016x}, as it says")


def _checked(frame: np.ndarray, place: tuple[int, int, int], digest: int, where: str) -> DeltaHeader:
    """Return the header of a whole frame that belongs to a place (identity, slab, slabs), and changes what has a digest."""
    header = read_header(frame)
    wrong = header if isinstance(header, str) else frame_fault(frame, header)
    if wrong is not None or isinstance(header, str):
        raise DataError(where, got=f"a delta that is cut off or altered ({wrong})", expected="the delta as it was written")
    if (header.lane, header.number, header.messages) != place:
        raise DataError(where, got="a delta of another slab", expected="the delta as it was written")
    if header.before != digest:
        raise DataError(where, got=f"a change of digest {header.before:016x}", expected=f"one of {digest:016x}, which is there")
    return header
