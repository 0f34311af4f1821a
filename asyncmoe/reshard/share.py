"""Who sends what, where several sources hold the same elements."""

from __future__ import annotations

import numpy as np

from asyncmoe.reshard.layout import ITEM_BYTES
from asyncmoe.reshard.overlap import Holdings, Overlaps, ranges
from asyncmoe.reshard.table import DTYPES, Table

_ITEM_BYTES = np.array([ITEM_BYTES[name] for name in DTYPES], np.int64)
_SLICES_PER_RANK = 32
"""A slice is at most this fraction of what a rank would send if all sent alike, which bounds the imbalance to about 1 / 32."""
_SMALLEST_SLICE = 1 << 16


def share(holdings: Holdings, wanted: Table, found: Overlaps) -> tuple[Overlaps, np.ndarray]:
    """Choose a holder for every overlap; overlaps that many hold may come back in slices.

    The destination's own rank where it holds the elements; else the only holder; else, largest first, the holder with the least
    to send so far (ties: the lowest rank).

    Returns:
        Overlaps, and for each of them the chosen row of the holdings' table.
    """
    own, only = _without_choice(holdings, wanted, found)
    chosen = np.where(own >= 0, own, only)
    found, chosen = _sliced(holdings, wanted, found, chosen)
    nbytes = found.extent.prod(1) * _ITEM_BYTES[wanted.dtype[found.row]]
    rank = holdings.table.rank
    fixed = np.flatnonzero((chosen >= 0) & (rank[chosen] != wanted.rank[found.row]))
    load = np.zeros(len(holdings.ranks), np.int64)
    np.add.at(load, holdings.rank_of[chosen[fixed]], nbytes[fixed])
    free = np.flatnonzero(chosen < 0)
    sent = load.tolist()
    for i in free[np.argsort(-nbytes[free], kind="stable")].tolist():
        cell = found.cell[i]
        holders = holdings.holders[holdings.first[cell] : holdings.first[cell + 1]]
        places = holdings.rank_of[holders].tolist()
        best = min(range(len(places)), key=lambda k: sent[places[k]])
        sent[places[best]] += int(nbytes[i])
        chosen[i] = holders[best]
    return found, chosen


def _without_choice(holdings: Holdings, wanted: Table, found: Overlaps) -> tuple[np.ndarray, np.ndarray]:
    """For each overlap the holder on the destination's own rank, and the only holder; -1 where there is none."""
    count = np.diff(holdings.first)[found.cell]
    overlap = np.repeat(np.arange(len(count)), count)
    holder = holdings.holders[ranges(holdings.first[found.cell], count)]
    local = np.flatnonzero(holdings.table.rank[holder] == wanted.rank[found.row[overlap]])[::-1]
    own = np.full(len(count), -1)
    own[overlap[local]] = holder[local]
    return own, np.where(count == 1, holdings.holders[holdings.first[found.cell]], -1)


def _sliced(holdings: Holdings, wanted: Table, found: Overlaps, chosen: np.ndarray) -> tuple[Overlaps, np.ndarray]:
    """Cut overlaps that still have a choice of holders into slices along their first dimension of more than one entry."""
    nbytes = found.extent.prod(1) * _ITEM_BYTES[wanted.dtype[found.row]]
    remote = (chosen < 0) | (holdings.table.rank[chosen] != wanted.rank[found.row])
    largest = max(_SMALLEST_SLICE, int(nbytes[remote].sum()) // (_SLICES_PER_RANK * max(1, len(holdings.ranks))))
    axis = (found.extent > 1).argmax(1)
    length = np.take_along_axis(found.extent, axis[:, None], 1)[:, 0]
    parts = np.where(chosen < 0, np.minimum(length, -(-nbytes // largest)), 1)
    source = np.repeat(np.arange(len(parts)), parts)
    k = ranges(np.zeros_like(parts), parts)
    begin, end = length[source] * k // parts[source], length[source] * (k + 1) // parts[source]
    start, extent = found.start[source], found.extent[source]
    line = np.arange(len(source))
    start[line, axis[source]] += begin
    extent[line, axis[source]] = end - begin
    return Overlaps(found.cell[source], found.row[source], start, extent), chosen[source]
