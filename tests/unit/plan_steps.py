"""A plan executed copy by copy with NumPy, all ranks in one process."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from reshard_ranks import Arrays

from asyncmoe.reshard import Plan
from asyncmoe.reshard.plan import (
    DESTINATION,
    DESTINATION_OFFSET,
    DESTINATION_STRIDES,
    EXTENTS,
    NO_SOURCE,
    SOURCE,
    SOURCE_OFFSET,
    SOURCE_STRIDES,
)


def carry_out(plan: Plan, sources: Mapping[int, Arrays], destinations: Mapping[int, Arrays]) -> None:
    """Write into `destinations` what the plan copies from `sources`; all arrays are by rank and storage name."""
    for transfer in plan.transfers:
        read = [*plan.sources.get(transfer.source, {})]
        written = [*plan.destinations[transfer.destination]]
        for copy in transfer.copies:
            target = destinations[transfer.destination][written[copy[DESTINATION]]]
            view = box_view(target, copy[DESTINATION_OFFSET], copy[EXTENTS], copy[DESTINATION_STRIDES])
            if copy[SOURCE] == NO_SOURCE:
                view[...] = 0
            else:
                origin = sources[transfer.source][read[copy[SOURCE]]]
                view[...] = box_view(origin, copy[SOURCE_OFFSET], copy[EXTENTS], copy[SOURCE_STRIDES])


def box_view(array: np.ndarray, offset: int, extents: np.ndarray, strides: np.ndarray) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(array.reshape(-1)[offset // array.itemsize :], extents.tolist(), strides.tolist())
