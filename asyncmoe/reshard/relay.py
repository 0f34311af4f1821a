"""Fan-out to replicas: the sources send every element to one replica, and the replicas forward it to each other.

With R ranks of equal layouts (the same rank of R equal engines), each receives 1/R of its bytes from the sources in a first round and the
rest from the other replicas in a second, in the order in which it arrives there. The sources' traffic does not grow with R, and a replica
receives every byte it needs once.

A relay pays off if each rank's network card is the bottleneck. With T source ranks, R engines of E ranks and a model of B bytes, a source
sends R*B/T without a relay and B/T with it, and an engine rank sends (R-1)/R * B/E besides receiving B/E: worth it once R*E > T. It does
not pay off between processes of one host, where messages lie in shared memory: every forwarded byte is packed and unpacked once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from asyncmoe.reshard.arrival import in_order_of_arrival
from asyncmoe.reshard.coverage import check_destination
from asyncmoe.reshard.layout import MAX_DIMS, RankLayout
from asyncmoe.reshard.match import Match, Sources
from asyncmoe.reshard.plan import Plan, assemble
from asyncmoe.reshard.table import (
    DTYPE,
    DTYPE_BYTES,
    EXTENT,
    NO_TENSOR,
    OFFSET,
    START,
    STRIDES,
    TENSOR,
    Side,
    Table,
    enumerate_tensors,
    tabulate,
)

_SMALLEST_CUT = 1 << 15
"""Pieces of fewer bytes are not cut."""
_SLICE_BYTES = 1 << 20
_TURNS = 64
"""Most slices of a table that a part consists of."""


def relay(
    tensors: Mapping[str, tuple[int, ...]],
    source: Iterable[RankLayout],
    destination: Iterable[RankLayout],
    *,
    ranks: Iterable[int] | None = None,
) -> tuple[Plan, ...]:
    """Plan the copies from `source` to `destination` in rounds; each round must finish before the next.

    The first round reads the source arrays. The second reads and writes the destination arrays: a rank passes them to `exchange` as both.
    Together the rounds write every destination element exactly once. A destination rank that is also a source receives everything in the
    first round, since it already holds a part. Casts are made in the first round; a tensor that is float32 in one destination and bfloat16
    in another cannot be forwarded and is refused.

    Args:
        tensors, source, destination, ranks: as for `asyncmoe.reshard.plan`.

    Returns:
        One plan if no two destination layouts are equal, else two.

    Raises:
        LayoutError: as `asyncmoe.reshard.plan`.
    """
    wanted = None if ranks is None else list(ranks)
    matches = relay_matches(tensors, source, destination)
    made = [assemble(match, wanted) for match in matches]
    if len(made) == 2 and made[1].transfers:
        arriving = assemble(matches[0], {transfer.source for transfer in made[1].transfers})
        made[1] = replace(made[1], transfers=in_order_of_arrival(made[1], arriving))
    return tuple(made)


def relay_matches(
    tensors: Mapping[str, tuple[int, ...]], source: Iterable[RankLayout], destination: Iterable[RankLayout]
) -> tuple[Match, ...]:
    """Return the matches from which `relay` assembles its rounds."""
    numbered = enumerate_tensors(tensors)
    sources = Sources(numbered, tabulate(numbered, source))
    side = tabulate(numbered, destination)
    for table in side.tables:
        check_destination(numbered, table)
    first = _divided(side, set(sources.side.ranks.tolist()))
    rounds = [Match(sources, first, covered=False)]
    if len(first.tables) > len(side.tables):
        rounds.append(Match(Sources(numbered, first), side, covered=False, in_place=True))
    return tuple(rounds)


def replicas(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Return the destination ranks of a plan with equal layouts, in order, by the first of them; also of a plan that is a part."""
    side = plan.match.side
    equal = [tuple(side.ranks[side.table_of == number].tolist()) for number in range(len(side.tables))]
    return {ranks[0]: ranks for ranks in equal}


def _divided(side: Side, colocated: set[int]) -> Side:
    """Divide each table among its ranks, except `colocated` ones, which get all of it; every rank gets all of its table's padding."""
    tables: list[Table] = []
    table_of = np.zeros(len(side.ranks), np.int64)
    for number, table in enumerate(side.tables):
        places = np.flatnonzero(side.table_of == number)
        replicas = [i for i in places.tolist() if int(side.ranks[i]) not in colocated]
        alone = [i for i in places.tolist() if int(side.ranks[i]) in colocated]
        if alone:
            table_of[alone] = len(tables)
            tables.append(table)
        for part, place in enumerate(replicas):
            table_of[place] = len(tables)
            tables.append(_part(table, part, len(replicas)))
    return Side(tuple(tables), side.ranks, table_of)


def _part(table: Table, part: int, parts: int) -> Table:
    """Return one of `parts` equal parts of a table's bytes, and all padding: one slice of every `parts`, of at least `_SLICE_BYTES`, so
    that each part holds something of every source and no source's link to one replica becomes the narrowest."""
    padding = table.pieces[:, TENSOR] == NO_TENSOR
    pieces = table.pieces[~padding]
    nbytes = pieces[:, EXTENT].prod(1) * DTYPE_BYTES[pieces[:, DTYPE]]
    turns = max(1, min(_TURNS, int(nbytes.sum()) // (parts * _SLICE_BYTES)))
    kept = [_slice(pieces, nbytes, turn * parts + part, turns * parts) for turn in range(turns)]
    return Table(table.rank, table.names, table.storages, table.shapes, np.concatenate([*kept, table.pieces[padding]]))


def _slice(pieces: np.ndarray, nbytes: np.ndarray, part: int, parts: int) -> np.ndarray:
    """Return the pieces from `part / parts` to `(part + 1) / parts` of all bytes, the first and last one cut."""
    ends = np.cumsum(nbytes)
    low, high = (_rounded(pieces, nbytes, ends, int(ends[-1]) * k // parts if len(ends) else 0) for k in (part, part + 1))
    first = int(np.searchsorted(ends, low, "right"))
    last = int(np.searchsorted(ends - nbytes, high, "left")) if low < high else first
    kept = pieces[first:last].copy()
    for row in {first, last - 1} if first < last else ():
        begin = int(ends[row] - nbytes[row])
        _cut(kept[row - first], int(nbytes[row]), max(0, low - begin), min(int(nbytes[row]), high - begin))
    return kept


def _rounded(pieces: np.ndarray, nbytes: np.ndarray, ends: np.ndarray, at: int) -> int:
    """Return the position nearest to byte `at` at which a piece may be cut."""
    row = int(np.searchsorted(ends, at, "right"))
    if row == len(ends):
        return at
    begin, size = int(ends[row] - nbytes[row]), int(nbytes[row])
    unit = size if size < _SMALLEST_CUT else size // int(pieces[row][EXTENT][_axis(pieces[row])])
    return begin + (at - begin + unit // 2) // unit * unit


def _cut(piece: np.ndarray, nbytes: int, low: int, high: int) -> None:
    """Keep bytes [low, high) of a piece of `nbytes`; both are multiples of its row size."""
    axis = _axis(piece)
    unit = nbytes // int(piece[EXTENT][axis])
    piece[OFFSET] += low // unit * piece[STRIDES][axis]
    piece[START][axis] += low // unit
    piece[EXTENT][axis] = (high - low) // unit


def _axis(piece: np.ndarray) -> int:
    """Return the dimension along which a piece is cut: its first with more than one entry."""
    longer = np.flatnonzero(piece[EXTENT] > 1)
    return int(longer[0]) if len(longer) else MAX_DIMS - 1
