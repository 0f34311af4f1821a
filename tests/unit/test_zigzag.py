"""The rows that context-parallel ranks hold."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.platform import zigzag

SIZES = st.sampled_from([1, 2, 3, 4])


def bounds_of(lengths: list[int], size: int) -> list[int]:
    return [0, *accumulate(zigzag.padded(length, size) for length in lengths)]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), SIZES)
def test_every_row_is_held_once_and_all_ranks_have_equally_many_rows_and_causal_pairs(lengths: list[int], size: int) -> None:
    bounds, pairs = bounds_of(lengths, size), set()
    held = [zigzag.rows(bounds, size, rank) for rank in range(size)]
    assert {len(rows) for rows in held} == {bounds[-1] // size}
    assert torch.cat(held).sort().values.tolist() == list(range(bounds[-1]))
    for rows in held:
        for begin, end in pairwise(bounds):
            of_sequence = rows[(rows >= begin) & (rows < end)]
            assert len(of_sequence) == (end - begin) // size
            assert (of_sequence.diff() > 0).all()
            pairs.add((begin, int((of_sequence - begin + 1).sum())))
    assert len(pairs) == len(lengths)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), SIZES, st.data())
def test_positions_are_those_of_the_rows(lengths: list[int], size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    bounds = bounds_of(lengths, size)
    rows = zigzag.rows(bounds, size, rank)
    starts = np.array(bounds)[np.searchsorted(bounds, rows.numpy(), "right") - 1]
    found = zigzag.positions(torch.tensor(bounds, dtype=torch.int32), len(rows), size, rank)
    assert found.tolist() == (rows.numpy() - starts).tolist()
