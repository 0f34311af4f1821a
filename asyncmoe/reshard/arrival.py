"""When what a rank forwards has arrived there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from asyncmoe.reshard.chunks import Chunks, cut_boxes, cut_transfer
from asyncmoe.reshard.layout import Storage
from asyncmoe.reshard.plan import (
    DESTINATION,
    DESTINATION_OFFSET,
    DESTINATION_STRIDES,
    EXTENTS,
    ITEM,
    SOURCE,
    SOURCE_OFFSET,
    SOURCE_STRIDES,
    WIRE_OFFSET,
    Plan,
    Transfer,
)

_STEPS = 256
"""Parts of a transfer whose arrival is told apart."""


def in_order_of_arrival(second: Plan, first: Plan) -> tuple[Transfer, ...]:
    """Return the transfers of the second round with their boxes in the order in which they arrive at their source in the first round,
    given that all transfers to it begin and end together. Both ends of a transfer compute the same order.

    In any other order, the boxes of one source would wait until another source, which sends at the same time, had been forwarded.

    Args:
        second: the plan of the transfers.
        first: the part of the first round's plan of the transfers' sources.
    """
    ordered: dict[int, Transfer] = {}
    of_source: dict[int, list[int]] = {}
    for number, transfer in enumerate(second.transfers):
        of_source.setdefault(transfer.source, []).append(number)
    incoming: dict[int, list[Transfer]] = {rank: [] for rank in of_source}
    for transfer in first.transfers:
        if transfer.destination in incoming and transfer.destination != transfer.source:
            incoming[transfer.destination].append(transfer)
    for rank, numbers in of_source.items():
        begin, written = _arrivals(first, rank, incoming[rank])
        for number in numbers:
            transfer = second.transfers[number]
            alone = rank == transfer.destination or not incoming[rank]
            ordered[number] = transfer if alone else _ordered(transfer, second, begin, written)
    return tuple(ordered[number] for number in range(len(second.transfers)))


def _arrivals(first: Plan, rank: int, incoming: Sequence[Transfer]) -> tuple[dict[str, int], np.ndarray]:
    """Return where each storage of a rank begins in the count of `spans`, and the spans that arrive there, numbered by their step."""
    wanted = first.destinations.get(rank, {})
    begin = dict(zip(wanted, np.cumsum([0, *(storage.nbytes for storage in wanted.values())]).tolist(), strict=False))
    steps = [cut_transfer(first, t, 2 * t.nbytes + 4096, _STEPS) for t in incoming]
    return begin, spans(steps, begin, wanted, (DESTINATION, DESTINATION_OFFSET, DESTINATION_STRIDES))


def _ordered(transfer: Transfer, second: Plan, begin: Mapping[str, int], written: np.ndarray) -> Transfer:
    rank = transfer.source
    copies = cut_boxes(transfer.copies, max(1, transfer.nbytes // _STEPS))
    forwarded = Chunks(rank, transfer.destination, copies, np.array([0, len(copies)], np.int64), (transfer.nbytes,))
    read = spans([forwarded], begin, second.sources[rank], (SOURCE, SOURCE_OFFSET, SOURCE_STRIDES))
    copies = copies[np.argsort(latest(written, read), kind="stable")]
    nbytes = copies[:, EXTENTS].prod(1) * copies[:, ITEM]
    copies[:, WIRE_OFFSET] = np.cumsum(nbytes) - nbytes
    copies.flags.writeable = False
    return replace(transfer, copies=copies)


def spans(
    messages: Sequence[Chunks], begin: Mapping[str, int], storages: Mapping[str, Storage], side: tuple[int, int, slice]
) -> np.ndarray:
    """Return int64[n, 3] for every box: first byte, byte after the last, message number. Bytes count through all storages in order."""
    number, offset, strides = side
    bases = np.array([begin[name] for name in storages], np.int64)
    spans = [np.empty((0, 3), np.int64)]
    for chunks in messages:
        copies = chunks.copies
        first = bases[copies[:, number]] + copies[:, offset]
        last = first + ((copies[:, EXTENTS] - 1) * copies[:, strides]).sum(1) + copies[:, ITEM]
        spans.append(np.column_stack([first, last, np.repeat(np.arange(len(chunks)), np.diff(chunks.firsts))]))
    return np.concatenate(spans)


def latest(written: np.ndarray, read: np.ndarray) -> np.ndarray:
    """Return for each span of `read` one more than the highest message number among the `written` spans that may overlap it, or 0."""
    written = written[np.argsort(written[:, 0], kind="stable")]
    reach = np.maximum.accumulate(written[:, 1]) if len(written) else written[:, 1]
    low = np.searchsorted(reach, read[:, 0], "right")
    high = np.searchsorted(written[:, 0], read[:, 1], "left")
    numbers = np.append(written[:, 2] + 1, 0)
    found: np.ndarray = np.maximum.reduceat(numbers, np.column_stack([low, high]).reshape(-1))[::2] if len(read) else low
    return np.where(low < high, found, 0)
