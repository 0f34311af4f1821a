"""A growing array of token ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.rollout.episodes.token_buffer import TokenBuffer

tokens = st.lists(st.integers(0, (1 << 31) - 1), max_size=300)


@given(tokens, st.lists(tokens, max_size=6))
def test_it_holds_what_was_appended_and_earlier_arrays_stay(first: list[int], more: list[list[int]]) -> None:
    buffer, wanted = TokenBuffer(first), list(first)
    seen = [(buffer.array, list(wanted))]
    for number, part in enumerate(more):
        buffer.extend(np.array(part, np.int32) if number % 2 else tuple(part))
        wanted += part
        seen.append((buffer.array, list(wanted)))
        assert len(buffer) == len(wanted)
    for array, then in seen:
        assert array.dtype == np.int32
        assert array.tolist() == then


def test_nobody_else_can_change_it() -> None:
    array = TokenBuffer([1, 2]).array
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 3


def test_a_token_of_more_than_32_bits_is_refused() -> None:
    with pytest.raises(OverflowError):
        TokenBuffer([1]).extend([1 << 40])
