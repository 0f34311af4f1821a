"""Ranges of flat arrays as boxes."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.platform.megatron.state_boxes import boxes

shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@given(shapes, st.data())
def test_each_element_of_the_range_is_in_one_box_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = np.arange(prod(shape)).reshape(shape)
    begin = data.draw(st.integers(0, whole.size))
    end = data.draw(st.integers(begin, whole.size))
    found = list(boxes(shape, begin, end))
    parts = [whole[tuple(slice(a, a + n) for a, n in zip(box.offset, box.sizes, strict=True))] for box in found]
    flat = [int(value) for part in parts for value in part.reshape(-1)]
    assert flat == list(range(begin, end))
    assert [(box.begin, box.end) for box in found] == [(int(part.reshape(-1)[0]), int(part.reshape(-1)[-1]) + 1) for part in parts]
    assert len(found) <= max(1, 2 * len(shape) - 1)
