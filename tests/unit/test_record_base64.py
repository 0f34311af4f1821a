"""Base64: what Python encodes comes back, and nothing else is taken for it."""

from __future__ import annotations

import base64
import binascii

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncmoe.trajectory import decode_base64

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


@given(st.binary(max_size=200))
def test_what_was_encoded_comes_back(data: bytes) -> None:
    assert decode_base64(base64.b64encode(data).decode()).tobytes() == data


@given(st.one_of(st.text(ALPHABET + "=-_ \n\0", max_size=24), st.text(max_size=8)))
@example("====")
@example("A===")
@example("AA=A")
@example("AA==AAAA")
@example("AB==")
@example("AAB=")
@example("AAAA====")
@example("AAA\u0141")
def test_text_is_taken_only_if_it_is_how_its_bytes_are_written(text: str) -> None:
    try:
        data = base64.b64decode(text, validate=True)
        right = base64.b64encode(data).decode() == text
    except (binascii.Error, ValueError):
        right = False
    if right:
        assert decode_base64(text).tobytes() == data
    else:
        with pytest.raises(ValueError, match="expected"):
            decode_base64(text)


@given(st.binary(min_size=30, max_size=60), st.data())
def test_one_wrong_character_is_found_wherever_it_is(data: bytes, draw: st.DataObject) -> None:
    text = base64.b64encode(data).decode()
    at = draw.draw(st.integers(0, len(text) - 3))
    wrong = draw.draw(st.characters(exclude_characters=ALPHABET, max_codepoint=255))
    with pytest.raises(ValueError, match="expected"):
        decode_base64(text[:at] + wrong + text[at + 1 :])
