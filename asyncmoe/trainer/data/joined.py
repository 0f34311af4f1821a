"""Buffers that lie in one array, so that they can be broadcast as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from asyncmoe.trajectory import Buffer

ALIGNED = 16


@dataclass(frozen=True, eq=False)
class Joined:
    """Read-only buffers in `whole`, which is uint8[n], where `places_of` their sizes says."""

    whole: np.ndarray
    buffers: Sequence[memoryview]


def joined(buffers: Sequence[Buffer]) -> Joined:
    """Copy buffers into one array."""
    views = [memoryview(one).cast("B") for one in buffers]
    made = empty([len(one) for one in views])
    into = memoryview(made.whole.data).cast("B")
    for one, place in zip(views, places_of([len(one) for one in views]), strict=True):
        into[place] = one
    return made


def empty(sizes: Sequence[int]) -> Joined:
    """Return buffers of some sizes, whose contents are whatever was in memory."""
    places = places_of(sizes)
    whole = np.empty(places[-1].stop if places else 0, np.uint8)
    view = memoryview(whole.data).cast("B").toreadonly()
    return Joined(whole, [view[place] for place in places])


def places_of(sizes: Sequence[int]) -> list[slice]:
    """Return where buffers of some sizes lie in one: each begins at a multiple of `ALIGNED`, as arrays are made of them in place."""
    starts = [0, *accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
