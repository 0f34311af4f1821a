"""The bytes of a delta: the code of positions against its definition, and damaged, truncated, repeated and foreign messages."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pytest
from delta_ranks import Ranks, change
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reshard_delta import large, matrix

import asyncmoe.reshard._C as _C
from asyncmoe.errors import TransferError
from asyncmoe.reshard import plan
from asyncmoe.reshard.delta_format import FRAME_BYTES, HEADER_BYTES, DeltaHeader, read_header, seal
from tests.unit.example_counts import examples

HALF = 100


def gap_bytes(gap: int) -> bytes:
    """The code of a gap, by the definition in csrc/delta_code.h."""
    if gap < 224:
        return bytes([gap])
    if gap < 224 + 256 * 31:
        return bytes([224 + (gap - 224) // 256, (gap - 224) % 256])
    return bytes([255, *gap.to_bytes(3, "little")])


def one_block(count: int) -> Ranks:
    """A single block of `count` elements of one byte, from rank 0 to rank 1; all are 0."""
    source, got = np.zeros(count, np.uint8), np.zeros(count, np.uint8)
    made = plan({"w": (count,)}, [matrix(0, (count,), "uint8")], [matrix(1, (count,), "uint8")])
    ranks = Ranks(made, {0: {"s": source}}, {1: {"s": got}})
    ranks.full(1)
    return ranks


@given(st.sets(st.integers(0, 131071), min_size=1, max_size=300), st.integers(0, 40))
@settings(max_examples=examples(100), deadline=None)
def test_payloads_are_those_of_the_definition(positions: set[int], shift: int) -> None:
    """Including gaps at both ends of each length of the code."""
    chosen = sorted({*positions, *(p for p in (0, 224 + shift, 449 + shift, 8609 + 2 * shift, 16769 + 3 * shift, 131071) if shift % 2)})
    ranks = one_block(131072)
    ranks.sources[0]["s"][chosen] = 7
    ranks.encode(2)
    (message,) = ranks.senders[0].messages(1)
    gaps = b"".join(gap_bytes(b - a - 1) for a, b in zip([-1, *chosen[:-1]], chosen, strict=True))
    expected = struct.pack("<II", len(chosen), len(gaps)) + gaps + bytes([7] * len(chosen))
    assert message[HEADER_BYTES:-8].tobytes() == expected
    ranks.commit(2)
    np.testing.assert_array_equal(np.flatnonzero(ranks.destinations[1]["s"]), chosen)


# ---------------------------------------------------------------- bad input


def resealed(message: np.ndarray, payload: bytes) -> np.ndarray:
    """A message with another payload, and length and digest that fit."""
    header = read_header(message)
    assert isinstance(header, DeltaHeader)
    frame = np.zeros(FRAME_BYTES + len(payload), np.uint8)
    frame[HEADER_BYTES : HEADER_BYTES + len(payload)] = np.frombuffer(payload, np.uint8)
    fields = {name: getattr(header, name) for name in DeltaHeader.__slots__}
    return seal(frame, DeltaHeader(**{**fields, "payload": len(payload)}))


def body(*entries: tuple[int, int], rest: bytes = b"") -> bytes:
    return b"".join(struct.pack("<II", *entry) for entry in entries) + rest


BAD_PAYLOADS = {
    "nothing": b"",
    "half an entry": body((1, 1))[:5],
    "no body": body((1, 1)),
    "a value is missing": body((2, 2), rest=b"\0\0\1"),
    "a byte too many": body((1, 1), rest=b"\0\1\0"),
    "more elements than there are": body((HALF + 1, HALF + 1), rest=b"\0" * (2 * HALF + 2)),
    "a position outside": body((1, 1), rest=bytes([HALF, 9])),
    "the second position outside": body((2, 2), rest=bytes([90, 9, 1, 1])),
    "a gap cut off": body((1, 1), rest=bytes([230, 9])),
    "a long gap cut off": body((1, 2), rest=bytes([255, 0, 9])),
    "a short gap in the long form": body((1, 4), rest=bytes([255, 5, 0, 0, 9])),
    "bytes of gaps left over": body((1, 2), rest=bytes([5, 5, 9])),
    "too few gaps": body((2, 1), rest=bytes([5, 9, 9])),
    "dense with gaps": body((0xFFFFFFFF, 1), rest=b"\0" * (HALF + 1)),
    "dense and short": body((0xFFFFFFFF, 0), rest=b"\0" * (HALF - 1)),
    "dense and long": body((0xFFFFFFFF, 0), rest=b"\0" * (HALF + 1)),
    "lengths that overflow": body((0x7FFFFFFF, 0xFFFFFFFF), rest=b"\0" * 50),
    "gaps that reach beyond": body((0, 90), rest=b"\0" * 50),
}


@pytest.mark.parametrize("payload", BAD_PAYLOADS.values(), ids=BAD_PAYLOADS)
def test_payloads_that_do_not_fit_the_plan_are_refused_though_their_digest_is_right(payload: bytes) -> None:
    ranks = one_block(HALF)
    ranks.sources[0]["s"][5] = 1
    ranks.encode(2)
    (good,) = ranks.senders[0].messages(1)
    with pytest.raises(TransferError, match="of a delta: "):
        ranks.receivers[1].stage(0, resealed(good, payload))
    assert not ranks.destinations[1]["s"].any()
    assert ranks.receivers[1].missing == [(0, 0)]
    ranks.commit(2)  # the good one is still welcome
    assert ranks.destinations[1]["s"][5] == 1


def test_a_well_formed_change_that_the_sender_did_not_make_is_refused_before_anything_is_written() -> None:
    """Other values, or other positions, in a message whose digest was computed anew."""
    for payload in (body((1, 1), rest=bytes([5, 2])), body((1, 1), rest=bytes([6, 1])), body((0, 0))):
        ranks = one_block(HALF)
        ranks.sources[0]["s"][5] = 1
        ranks.encode(2)
        ranks.receivers[1].stage(0, resealed(ranks.senders[0].messages(1)[0], payload))
        with pytest.raises(TransferError, match="does not make version 2"):
            ranks.receivers[1].commit(2)
        assert not ranks.destinations[1]["s"].any()


def test_any_damaged_byte_is_refused() -> None:
    """Every byte of a message, one after the other, in three ways."""
    ranks = one_block(1000)
    generator = np.random.default_rng(0)
    change(ranks.sources[0]["s"], 0.05, generator)
    ranks.encode(2)
    (message,) = ranks.senders[0].messages(1)
    receiver = ranks.receivers[1]
    for place in range(len(message)):
        for flip in (1, 0x80, int(generator.integers(1, 256))):
            damaged = message.copy()
            damaged[place] ^= flip
            with pytest.raises(TransferError):
                receiver.stage(0, damaged)
            assert receiver.staged_bytes == 0
    assert not ranks.destinations[1]["s"].any()
    ranks.commit(2)


def test_any_truncation_and_any_addition_is_refused() -> None:
    ranks = one_block(1000)
    change(ranks.sources[0]["s"], 0.05, np.random.default_rng(0))
    ranks.encode(2)
    (message,) = ranks.senders[0].messages(1)
    for length in range(len(message)):
        with pytest.raises(TransferError):
            ranks.receivers[1].stage(0, message[:length].copy())
    for more in (1, 8, 100):
        with pytest.raises(TransferError):
            ranks.receivers[1].stage(0, np.concatenate([message, np.zeros(more, np.uint8)]))


def refusals(ranks: Ranks) -> Iterator[tuple[str, int, np.ndarray]]:
    """(what is said, source rank, message) of messages that are whole, and not meant for here and now."""
    first, second, *_ = ranks.senders[0].messages(1)
    yield "number 1 twice", 0, first
    other = large("bfloat16", 2, 600)[0]
    other.full(1)
    other.encode(2)
    yield "of another plan", 0, other.senders[0].messages(1)[0]
    yield "of another plan", 5, second


@pytest.mark.parametrize("which", range(3))
def test_repeated_and_foreign_messages_are_refused(which: int) -> None:
    ranks, _, _ = large("bfloat16", 2)
    ranks.full(1)
    change(ranks.sources[0]["s"], 0.01, np.random.default_rng(1))
    ranks.encode(2)
    assert len(ranks.senders[0].messages(1)) == 3
    ranks.receivers[1].stage(0, ranks.senders[0].messages(1)[0])
    what, source, message = list(refusals(ranks))[which]
    with pytest.raises(TransferError, match=what):
        ranks.receivers[1].stage(source, message)
    assert len(ranks.receivers[1].missing) == 3


def test_a_version_that_was_applied_is_not_applied_again() -> None:
    ranks, _, _ = large("bfloat16", 2)
    ranks.full(1)
    change(ranks.sources[0]["s"], 0.01, np.random.default_rng(1))
    ranks.encode(2)
    old = [message.copy() for message in ranks.senders[0].messages(1)]
    ranks.commit(2)
    with pytest.raises(TransferError, match="got a change of version 1, expected one of 2"):
        ranks.receivers[1].stage(0, old[0])


def test_messages_of_two_versions_are_not_mixed() -> None:
    ranks, _, _ = large("bfloat16", 2)
    ranks.full(1)
    ranks.encode(2)
    early = ranks.senders[0].messages(1)[0]
    ranks.senders[0].abandon()
    ranks.encode(3)
    ranks.receivers[1].stage(0, ranks.senders[0].messages(1)[1])
    with pytest.raises(TransferError, match="got version 2, expected 3"):
        ranks.receivers[1].stage(0, early)


# ---------------------------------------------------------------- memory


def test_buffers_are_bounded_before_they_are_taken() -> None:
    ranks, _, _ = large("bfloat16", 2)
    sender, receiver = ranks.senders[0], ranks.receivers[1]
    ranks.full(1)
    nbytes = ranks.sources[0]["s"].nbytes
    assert sender.base_bytes == nbytes
    assert sender.largest_message <= (1 << 19) + FRAME_BYTES + 8 * 8
    assert sender.largest_delta == receiver.limit_bytes
    assert receiver.limit_bytes <= nbytes * 1.0005 + 3 * FRAME_BYTES
    change(ranks.sources[0]["s"], 1.0, np.random.default_rng(1))
    size = sender.encode(2)
    assert size is not None
    assert nbytes < size.nbytes <= receiver.limit_bytes
    sender.abandon()
    assert sender.encode(2, limit_bytes=size.nbytes - 1) is None
    assert list(sender.messages(1)) == []
    assert sender.encode(2, limit_bytes=size.nbytes) == size


def test_a_header_says_how_much_memory_a_message_takes_and_cannot_ask_for_more() -> None:
    ranks, _, _ = large("bfloat16", 2)
    ranks.full(1)
    change(ranks.sources[0]["s"], 0.01, np.random.default_rng(1))
    ranks.encode(2)
    message = ranks.senders[0].messages(1)[0]
    receiver = ranks.receivers[1]
    assert receiver.message_bytes(0, message[:HEADER_BYTES]) == len(message)
    greedy = message[:HEADER_BYTES].copy()
    greedy[-8:] = 255
    with pytest.raises(TransferError, match="expected at most"):
        receiver.message_bytes(0, greedy)
    receiver.limit_bytes = len(message) - 1
    with pytest.raises(TransferError, match="expected at most"):
        receiver.stage(0, message)


def test_tables_check_their_rows() -> None:
    row = np.array([[0, 0, 0, 0, 2, 1, 1, 1, 10, 0, 0, 0, 2, 0, 0, 0, 2]], np.int64)
    one, seed = np.array([0, 1], np.int64), np.zeros(1, np.int64)
    assert _C.DeltaTable(row, one, seed).bytes(0) == 20

    def refused(words: str, column: int, value: int) -> None:
        wrong = row.copy()
        wrong[0, column] = value
        with pytest.raises(ValueError, match=words):
            _C.DeltaTable(wrong, one, seed)

    refused("tensor of delta row 0: got 1", 0, 1)
    refused("item bytes of delta row 0: got 3", 4, 3)
    refused("bytes of delta row 0: got 200000", 8, 100_000)
    refused("bytes of delta row 0: got 0", 8, 0)
    with pytest.raises(ValueError, match="first rows of chunks"):
        _C.DeltaTable(row, np.array([0, 2], np.int64), seed)
    with pytest.raises(ValueError, match="got 0, expected at least 1"):
        _C.DeltaTable(row, one, seed).read(0, np.empty(0, np.int64))
    with pytest.raises(ValueError, match="got 1, expected below 1"):
        _C.DeltaTable(row, one, seed).bytes(1)
