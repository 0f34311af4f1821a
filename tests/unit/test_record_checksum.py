"""CRC-32C against the published vectors, and the processor's instruction against the tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.trajectory import _C
from asyncmoe.trajectory.native import crc32c

# RFC 3720, appendix B.4.
PUBLISHED = {
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(reversed(range(32))): 0x113FDB5C,
    b"123456789": 0xE3069283,
}


@pytest.mark.parametrize("function", [crc32c, _C.crc32c_by_table])
def test_the_published_vectors(function: object) -> None:
    assert callable(function)
    assert {data: function(data) for data in PUBLISHED} == PUBLISHED
    assert function(b"") == 0


@given(st.binary(max_size=300), st.integers(0, 300), st.integers(0, 2**32 - 1))
def test_both_ways_agree_from_any_start(data: bytes, cut: int, before: int) -> None:
    assert crc32c(data, before) == _C.crc32c_by_table(data, before)
    assert crc32c(data[cut:], crc32c(data[:cut], before)) == crc32c(data, before)


def test_large_buffers_and_views_are_taken_and_gaps_are_refused() -> None:
    data = bytes(range(256)) * 1024
    assert crc32c(memoryview(data)[3:]) == _C.crc32c_by_table(data[3:])
    with pytest.raises(ValueError, match="consecutive"):
        crc32c(memoryview(data)[::2])
