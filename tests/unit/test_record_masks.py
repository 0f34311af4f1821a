"""Sampling masks: packing round trips, in the smaller of two formats; damage is always detected."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_trajectory import masks_of

from asyncmoe.errors import ProtocolError, TrajectoryRejected
from asyncmoe.trajectory import EncodedMasks, Masks, decode_masks, encode_masks
from asyncmoe.trajectory.masks import _digest, token_outside
from tests.unit.example_counts import examples


@st.composite
def masks(draw: st.DrawFn) -> Masks:
    vocabulary = draw(st.one_of(st.integers(1, 300), st.sampled_from([151_936, 2**31 - 1])))
    ids = st.integers(0, vocabulary - 1)
    return masks_of([sorted(draw(st.sets(ids, max_size=20))) for _ in range(draw(st.integers(0, 12)))], vocabulary)


@settings(deadline=None, max_examples=examples(200))
@given(masks())
def test_round_trip(given_: Masks) -> None:
    back = decode_masks(encode_masks(given_, "t"), "t")
    assert back.offsets.dtype == back.ids.dtype == np.int32
    assert back.offsets.tolist() == given_.offsets.tolist()
    assert (back.ids.tolist(), back.vocabulary) == (given_.ids.tolist(), given_.vocabulary)


def test_the_smaller_way_is_taken() -> None:
    near, far = masks_of([list(range(100, 150))], 151_936), masks_of([list(range(5_000, 150_000, 20_000))], 151_936)
    assert len(encode_masks(near, "t").data) == 1 + 1 + 50, "a gap of 0 takes a byte"
    assert len(encode_masks(far, "t").data) == 1 + 1 + 18, "8 ids of 18 bits, where their gaps take 3 bytes each"


@pytest.mark.parametrize(
    ("rows", "offsets", "what"),
    [
        ([[1, 2], [3, 3]], None, "row 1: got id 3 after 3"),
        ([[1], [4, 2]], None, "row 1: got id 2 after 4"),
        ([[9]], None, "row 0: got id 9"),
        ([[-1]], None, "row 0: got id -1"),
        ([[1, 2]], [0, 1], "offsets: got 0 to 1, expected 0 to 2"),
        ([[1, 2]], [], "offsets: got none, expected 0 to 2"),
        ([[1, 2]], [0, 3, 2], "offsets: got 2 after 3, expected offsets that do not fall"),
    ],
)
def test_what_are_no_masks_is_refused(rows: list[list[int]], offsets: list[int] | None, what: str) -> None:
    made = masks_of(rows, 9)
    if offsets is not None:
        made = dataclasses.replace(made, offsets=np.array(offsets, np.int32))
    with pytest.raises(TrajectoryRejected, match=f"^bad_mask: g1: {what}"):
        encode_masks(made, "g1")


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TrajectoryRejected, match=r"^bad_mask"):
        encode_masks(Masks(np.array([0, 1]), np.array([3]), 9), "g1")


@settings(deadline=None)
@given(masks(), st.data())
def test_any_damage_is_refused(given_: Masks, data: st.DataObject) -> None:
    made = encode_masks(given_, "t")
    raw, changes = bytearray(made.data), {}
    kind = data.draw(st.sampled_from(["byte", "shorter", "longer", "rows", "ids", "vocabulary", "digest"]))
    if kind == "byte":
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    elif kind == "shorter":
        del raw[-data.draw(st.integers(1, len(raw))) :]
    elif kind == "longer":
        raw += b"\0"
    else:
        changes[kind] = getattr(made, kind) + data.draw(st.sampled_from([-1, 1, 2**40]))
    with pytest.raises(ProtocolError, match="masks of g1"):
        decode_masks(dataclasses.replace(made, data=bytes(raw), **changes), "g1")


def sealed(rows: int, ids: int, vocabulary: int, data: bytes) -> EncodedMasks:
    return EncodedMasks(rows, ids, vocabulary, _digest(rows, ids, vocabulary, data), data)


@settings(deadline=None, max_examples=examples(300))
@given(
    st.integers(0, 5), st.integers(0, 20), st.integers(1, 300), st.binary(max_size=30).map(lambda b: bytes([b[0] & 1]) + b[1:] if b else b)
)
def test_noise_whose_digest_is_right_is_refused_or_made_of_good_masks(rows: int, ids: int, vocabulary: int, data: bytes) -> None:
    try:
        back = decode_masks(sealed(rows, ids, vocabulary, data), "t")
    except ProtocolError:
        return
    again = decode_masks(encode_masks(back, "t"), "t")
    assert (len(again), len(again.ids)) == (rows, ids)


def test_token_outside_names_the_first_row_without_its_token() -> None:
    made = masks_of([[1, 4], [], [2], [7, 8]], 9)
    assert token_outside(made, np.array([4, 0, 2, 7], np.int32)) is None
    assert token_outside(made, np.array([4, 0, 1, 6], np.int32)) == 2
    assert token_outside(made, np.array([2, 0, 2, 7], np.int32)) == 0
