"""Convert a plan's copies to the programs of csrc/program.h."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError
from asyncmoe.reshard.chunks import Chunks, message_strides
from asyncmoe.reshard.float8 import SCALES, scales_shape
from asyncmoe.reshard.layout import Storage
from asyncmoe.reshard.plan import (
    CAST,
    COLUMNS,
    DESTINATION,
    DESTINATION_OFFSET,
    DESTINATION_STRIDES,
    EXTENTS,
    ITEM,
    SOURCE,
    SOURCE_OFFSET,
    SOURCE_STRIDES,
    WIRE_OFFSET,
)

FLOAT_TO_BFLOAT, FLOAT_TO_FLOAT8, BFLOAT_TO_FLOAT8 = 1, 2, 3
"""Casts as numbered in csrc/cast.h; 0 means no cast."""
_SOURCE_BYTES = np.array([0, 4, 4, 2], np.int64)

Side = tuple[np.ndarray, np.ndarray, np.ndarray]
"""One side of some copies: index of the array, byte offset in it, byte strides."""


@dataclass(frozen=True, eq=False)
class Scales:
    """The scales with which source storages are quantised.

    Attributes:
        storages: storages of scales, by name, that the copies do not read otherwise; their addresses follow the sources' addresses, in this
            order.
        index: int64[sources]; index, among all these addresses, of each source storage's scales; -1 if the storage is not quantised.
        width: int64[sources]; elements in a row of each source storage.
    """

    storages: Mapping[str, Storage]
    index: np.ndarray
    width: np.ndarray


_NO_SCALES = Scales({}, np.empty(0, np.int64), np.empty(0, np.int64))


def scales_of(sources: Mapping[str, Storage], parts: Sequence[np.ndarray]) -> Scales:
    """Return the scales that a rank's copies need for its source storages.

    Args:
        parts: the copies, as `Transfer.copies`.

    Raises:
        LayoutError: a quantised storage is not a matrix.
    """
    quantised = {int(number) for copies in parts for number in np.unique(copies[copies[:, CAST] >= FLOAT_TO_FLOAT8, SOURCE])}
    if not quantised:
        return _NO_SCALES
    index = np.full(len(sources), -1, np.int64)
    place = {name: number for number, name in enumerate(sources)}
    storages: dict[str, Storage] = {}
    for number, (name, storage) in enumerate(sources.items()):
        if number not in quantised:
            continue
        if len(storage.shape) != 2:
            raise LayoutError(f"storage {name}", got=f"shape {storage.shape}", expected="a matrix, to be quantised block by block")
        if name + SCALES not in place:
            place[name + SCALES] = len(place)
            storages[name + SCALES] = Storage(scales_shape(storage.shape), "float32")
        index[number] = place[name + SCALES]
    return Scales(storages, index, np.array([(1, *storage.shape)[-1] for storage in sources.values()], np.int64))


def message_program(chunks: Chunks, message: Literal["source", "destination"], scales: Scales = _NO_SCALES) -> _C.Program:
    """Return the program that copies between storages and the messages of a transfer.

    Args:
        message: the side of the copies that is the message: "destination" packs, "source" unpacks.
    """
    copies = chunks.copies
    wire = (np.zeros(len(copies), np.int64), copies[:, WIRE_OFFSET], message_strides(copies))
    if message == "source":
        return _C.Program(_rows(copies[:, ITEM], copies, wire, _destination(copies)), chunks.firsts, message)
    rows = _rows(_source_items(copies), copies, _source(copies), wire)
    return _C.Program(rows, chunks.firsts, message, _casts(copies, scales))


def local_program(parts: Sequence[np.ndarray], scales: Scales = _NO_SCALES) -> _C.Program | None:
    """Return the program that copies between storages of one rank and fills padding with zeros; None if there are no copies."""
    rows, casts = local_rows(parts, scales)
    return _C.Program(rows, np.array([0, len(rows)], np.int64), "none", casts) if len(rows) else None


def local_rows(parts: Sequence[np.ndarray], scales: Scales = _NO_SCALES) -> tuple[np.ndarray, np.ndarray]:
    """Return the descriptor rows and casts (csrc/copy.h) of copies within one rank, given as `Transfer.copies`."""
    copies = np.concatenate([np.empty((0, COLUMNS), np.int64), *parts])
    return _rows(_source_items(copies), copies, _source(copies), _destination(copies)), _casts(copies, scales)


def _casts(copies: np.ndarray, scales: Scales) -> np.ndarray:
    casts = np.zeros((len(copies), _C.CAST_COLUMNS), np.int64)
    casts[:, 0] = copies[:, CAST]
    quantised = copies[:, CAST] >= FLOAT_TO_FLOAT8
    if quantised.any():
        source = copies[quantised, SOURCE]
        casts[quantised, 1], casts[quantised, 2] = scales.index[source], scales.width[source]
    return casts


def _source(copies: np.ndarray) -> Side:
    return copies[:, SOURCE], copies[:, SOURCE_OFFSET], copies[:, SOURCE_STRIDES]


def _destination(copies: np.ndarray) -> Side:
    return copies[:, DESTINATION], copies[:, DESTINATION_OFFSET], copies[:, DESTINATION_STRIDES]


def _source_items(copies: np.ndarray) -> np.ndarray:
    items: np.ndarray = np.where(copies[:, CAST] != 0, _SOURCE_BYTES[copies[:, CAST]], copies[:, ITEM])
    return items


def _rows(items: np.ndarray, copies: np.ndarray, source: Side, destination: Side) -> np.ndarray:
    """Return descriptor rows in the column order of csrc/copy.h."""
    columns = [*source[:2], *destination[:2], items, copies[:, EXTENTS], source[2], destination[2]]
    return np.ascontiguousarray(np.column_stack(columns))
