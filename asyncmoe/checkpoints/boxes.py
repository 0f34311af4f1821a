"""A range of a row-major array as boxes, which is how a checkpoint's metadata can name what a rank holds of a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple


class FlatBox(NamedTuple):
    """A part of an array: where it begins and how long it is along each axis, and the place of its first element in the flat array."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int

    @property
    def end(self) -> int:
        """The place after its last element in the flat array: a box of `boxes` is contiguous."""
        return self.begin + prod(self.sizes)


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[FlatBox]:
    """Yield contiguous boxes, in order, that hold each element from `begin` to before `end` of the flat array once.

    At most 2 * len(shape) - 1 boxes: what is left of a row, whole rows, and the beginning of a row, for each axis.
    """
    if begin >= end:
        return
    if len(shape) <= 1:
        yield FlatBox((begin,) if shape else (), (end - begin,) if shape else (), begin)
        return
    row = prod(shape[1:])
    while begin < end:
        number, inside = divmod(begin, row)
        if inside or end - begin < row:
            stop = min(end, (number + 1) * row)
            for box in boxes(shape[1:], inside, stop - number * row):
                yield FlatBox((number, *box.offset), (1, *box.sizes), number * row + box.begin)
        else:
            stop = end - end % row
            yield FlatBox((number, *(0 for _ in shape[1:])), ((stop - begin) // row, *shape[1:]), begin)
        begin = stop
