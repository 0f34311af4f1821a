"""Deltas used wrongly, or from memory that somebody else writes: refused in one line, and the next full update helps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from delta_ranks import Ranks, change
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reshard_delta import large, matrix

import asyncmoe.reshard._C as _C
from asyncmoe.errors import InvariantBroken, LayoutError, TransferError
from asyncmoe.reshard import PADDING, DeltaReceiver, LayoutBuilder, expected_digest, plan
from asyncmoe.reshard.delta_format import HEADER_BYTES
from asyncmoe.reshard.layout import rows, whole
from tests.unit.example_counts import examples


def changed() -> Ranks:
    """A version 2 that is coded, of three messages, and version 1 at its destination."""
    ranks, _, _ = large("bfloat16", 2)
    ranks.full(1)
    change(ranks.sources[0]["s"], 0.01, np.random.default_rng(1))
    ranks.encode(2)
    return ranks


# ---------------------------------------------------------------- senders


def test_a_contribution_without_a_version_is_refused() -> None:
    ranks, _, _ = large("bfloat16", 2)
    sender = ranks.senders[0]
    with pytest.raises(InvariantBroken, match="got no version to digest for rank 1"):
        sender.contribution(1)
    ranks.full(1)
    held = sender.contribution(1)
    sender.full(2)
    assert sender.contribution(1) == held
    sender.abandon()
    with pytest.raises(InvariantBroken, match="got no version to digest for rank 1"):
        sender.contribution(1)


@pytest.mark.parametrize("touched", ["base", "message"])
def test_after_a_commit_that_failed_a_full_update_helps(touched: str) -> None:
    ranks, shapes, wanted = large("bfloat16", 2)
    sender = ranks.senders[0]
    ranks.full(1)
    change(ranks.sources[0]["s"], 1.0, np.random.default_rng(1))
    ranks.encode(2)
    (sender._streams[0].kept.base if touched == "base" else sender.messages(1)[1])[77] ^= 1
    with pytest.raises(InvariantBroken, match="changed in memory"):
        sender.commit()
    assert sender.base is None
    assert list(sender.messages(1)) == []
    with pytest.raises(InvariantBroken, match="expected a base"):
        sender.encode(3)
    ranks.full(3)
    ranks.check(shapes, [wanted])


# ---------------------------------------------------------------- memory that others write


def test_a_buffer_that_is_used_again_after_stage_changes_nothing() -> None:
    ranks = changed()
    receiver, buffer = ranks.receivers[1], np.zeros(ranks.senders[0].largest_message, np.uint8)
    for message in ranks.senders[0].messages(1):
        slot = buffer[: len(message)]
        slot[...] = message
        receiver.stage(0, slot)
        buffer[...] = 255
    receiver.commit(2)
    assert receiver.digest == ranks.expected(1)


@given(st.data())
@settings(max_examples=examples(40), deadline=None)
def test_what_is_checked_is_what_is_kept(data: st.DataObject) -> None:
    """The peer writes to a shared slot between the check of the header there and everything else: what is kept is checked on its own."""
    ranks = changed()
    receiver, message = ranks.receivers[1], ranks.senders[0].messages(1)[0].copy()
    place, flip = data.draw(st.integers(0, len(message) - 1)), data.draw(st.integers(1, 255))
    check = receiver._header

    def then_write(source: int, seen: np.ndarray) -> Any:
        found = check(source, seen)
        message[place] ^= flip
        return found

    receiver._header = then_write  # type: ignore[method-assign]
    with pytest.raises(TransferError):
        receiver.stage(0, message)
    assert receiver.staged_bytes == 0


def test_what_is_overwritten_after_the_checks_is_not_what_is_kept() -> None:
    ranks = changed()
    receiver = ranks.receivers[1]
    slots = [message.copy() for message in ranks.senders[0].messages(1)]
    one = receiver._incoming[0]
    table: Any = one.table

    class ThenOverwritten:
        def __getattr__(self, name: str) -> Any:
            return getattr(table, name)

        def fault(self, *payload: int) -> str | None:
            found: str | None = table.fault(*payload)
            for slot in slots:
                slot[HEADER_BYTES:] = 254
            return found

    one.table = ThenOverwritten()  # type: ignore[assignment]
    receiver.stage(0, slots[0])
    kept = one.staged[0][1].tobytes()
    assert kept == ranks.senders[0].messages(1)[0].tobytes()


def test_a_staged_message_that_changes_in_memory_is_an_error_of_the_transfer() -> None:
    ranks = changed()
    ranks.stage(1)
    receiver = ranks.receivers[1]
    receiver._incoming[0].staged[0][1][HEADER_BYTES : HEADER_BYTES + 4] = 254  # more changed elements than there are
    with pytest.raises(TransferError, match=r"changed in memory.* must be full"):
        receiver.prove(2)
    assert receiver.version is None


# ---------------------------------------------------------------- arguments


def test_a_rank_that_is_no_destination_is_refused() -> None:
    ranks, _, _ = large("bfloat16", 2)
    for rank in (77, 0):
        with pytest.raises(LayoutError, match=f"rank of a destination of deltas: got {rank}, expected one of the 1 of the plan"):
            DeltaReceiver(ranks.plan, rank)
        with pytest.raises(LayoutError, match=f"rank of a destination of deltas: got {rank}"):
            expected_digest(ranks.plan, rank, [])


def test_messages_are_arrays_of_bytes() -> None:
    ranks = changed()
    receiver, message = ranks.receivers[1], ranks.senders[0].messages(1)[0]
    wrong: list[tuple[Any, str]] = [(message.tobytes(), "got bytes"), (None, "got NoneType"), (message.view(np.int8), "an array of int8")]
    for other, words in wrong:
        for call in (receiver.message_bytes, receiver.stage):
            with pytest.raises(LayoutError, match=rf"{words}.*expected an array of uint8"):
                call(0, other)
    strided = np.repeat(message, 2)[::2]
    assert receiver.message_bytes(0, strided[:HEADER_BYTES]) == len(message)
    receiver.stage(0, strided)
    assert receiver.staged_bytes == len(message)


def test_versions_and_limits_are_checked() -> None:
    ranks, _, _ = large("bfloat16", 2)
    ranks.full(1)
    wrong: list[Any] = [-5, 1 << 64, "x", None, 1.0]
    for version in wrong:
        with pytest.raises(LayoutError, match="expected a whole number from 0"):
            ranks.receivers[1].adopt(version)
        with pytest.raises(LayoutError, match="expected a whole number from 0"):
            ranks.senders[0].encode(version)
    assert ranks.receivers[1].version == 1
    with pytest.raises(LayoutError, match="limit_bytes of a delta: got -1, expected a whole number from 0"):
        DeltaReceiver(ranks.plan, 1, limit_bytes=-1)
    with pytest.raises(LayoutError, match="limit_bytes of a delta: got -1, expected a whole number from 0"):
        ranks.senders[0].encode(2, limit_bytes=-1)


def test_padding_that_is_not_zero_is_found() -> None:
    """At `adopt`: no message ever covers it."""
    builder = LayoutBuilder(1, "bfloat16")
    builder.stack("s", [("w", whole((4, 6))), (PADDING, rows((2, 6), 0, 2))])
    source, got = np.ones((4, 6), np.uint16), np.zeros((6, 6), np.uint16)
    made = plan({"w": (4, 6)}, [matrix(0, (4, 6))], [builder.build()])
    ranks = Ranks(made, {0: {"s": source}}, {1: {"s": got}})
    ranks.full(1)
    receiver = ranks.receivers[1]
    got[5, 2] = 1
    with pytest.raises(TransferError, match="padding is not zero; the next update of this rank must be full"):
        receiver.adopt(2)
    assert receiver.version is None
    got[5, 2] = 0
    assert receiver.adopt(2) == ranks.expected(1)


# ---------------------------------------------------------------- tables of the compiled half


def test_a_table_of_other_rows_than_the_program_is_refused_before_anything_is_written() -> None:
    """Sizes in another order, with equal totals; and equal sizes at other places."""
    sizes, seed, firsts = [128 << 10, 1 << 10], np.zeros(1, np.int64), np.array([0, 2], np.int64)

    def box_rows(sizes: list[int], begins: list[int]) -> np.ndarray:
        """Rows of csrc/copy.h: `sizes` bytes each, at `begins` of the message."""
        return np.array([[0, at, 0, at, 1, 1, 1, 1, n, 0, 0, 0, 1, 0, 0, 0, 1] for n, at in zip(sizes, begins, strict=True)], np.int64)

    source, base = np.arange(129 << 10, dtype=np.uint32).astype(np.uint8), np.zeros(129 << 10, np.uint8)
    sources = np.array([source.ctypes.data], np.int64)
    pack = _C.Program(box_rows(sizes[::-1], [0, 1 << 10]), firsts, "destination")
    wrong = [(box_rows(sizes, [0, 128 << 10]), "row 0 has 131072 bytes"), (box_rows(sizes[::-1], [0, 1 << 20]), "row 1 does not follow")]
    for rows_of_table, words in wrong:
        table = _C.DeltaTable(rows_of_table, firsts, seed)
        with pytest.raises(ValueError, match=words):
            _C.encode_delta(table, pack, 0, sources, base.ctypes.data, 0, 0)
        with pytest.raises(ValueError, match=words):
            _C.fill_delta_base(table, pack, 0, sources, base.ctypes.data)
        assert not base.any()
    _C.fill_delta_base(_C.DeltaTable(box_rows(sizes[::-1], [0, 1 << 10]), firsts, seed), pack, 0, sources, base.ctypes.data)
    np.testing.assert_array_equal(base, source)
