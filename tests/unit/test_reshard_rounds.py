"""Rounds do not wait for busier pairs: the lock-step model on plans of a published model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.models import EngineParallel, MegatronParallel
from asyncmoe.models.payload import Payload
from asyncmoe.reshard import Plan, plan
from asyncmoe.reshard.chunks import cut_transfer, cuts_of, joined
from benchmarks.published import REAL
from benchmarks.rounds import ideal_seconds, lock_step_seconds, planned_messages

TRAINER = MegatronParallel(tp=4, pp=8, ep=8, dp=8, first_layers=11, last_layers=11)
BUCKET_BYTES, LINK = 256 << 20, 50e9


def planned(count: int, tp: int) -> Plan:
    """Qwen3-235B from 256 trainer ranks; the part of the first engine's first rank."""
    payload = Payload(REAL["Qwen3-235B-A22B"])
    destination = payload.engines(EngineParallel(tp, tp), "bfloat16", count, first=TRAINER.world)
    return plan(payload.tensors(), payload.trainer(TRAINER, "bfloat16"), destination, ranks=[TRAINER.world])


@pytest.mark.parametrize(("count", "tp", "pairs", "ideal"), [(32, 4, 3392, 2.352), (16, 8, 2624, 1.179)])
def test_lock_step_costs_at_most_a_twentieth(count: int, tp: int, pairs: int, ideal: float) -> None:
    """With messages of each pair as large as its share of a bucket allows, these took 2.92 s and 1.58 s."""
    made = planned(count, tp)
    messages = planned_messages(made, BUCKET_BYTES)
    assert len(messages) == pairs
    assert ideal_seconds(messages, LINK) == pytest.approx(ideal, abs=0.001)
    taken = lock_step_seconds(messages, LINK)
    assert ideal_seconds(messages, LINK) / taken >= 0.95
    cuts = cuts_of(made, BUCKET_BYTES)
    room = BUCKET_BYTES - BUCKET_BYTES // 8
    for rank in {rank for pair in cuts for rank in pair}:
        assert sum(cut.limit for pair, cut in cuts.items() if rank in pair) <= room
    received = np.zeros(max(map(len, messages.values())))
    for transfer in made.transfers:
        expected = messages[transfer.source, transfer.destination]
        real = np.array(cut_transfer(made, transfer, *cuts[transfer.source, transfer.destination]).nbytes)
        assert len(real) == len(expected)
        assert abs(real - expected).max() <= expected[0] / 16
        received[: len(real)] += real
    assert received.max() <= 1.04 * received.mean()  # the rows of boxes that cannot be cut, over the rank's lanes


@given(st.lists(st.integers(0, 100), min_size=1))
def test_coded_messages_fill_a_slot_before_another_begins(sizes: list[int]) -> None:
    parts = joined(sizes, 100)
    assert [number for part in parts for number in part] == list(range(len(sizes)))
    filled = [sum(sizes[number] for number in part) for part in parts]
    assert all(len(part) > 0 and nbytes <= 100 for part, nbytes in zip(parts, filled, strict=True))
    assert all(nbytes + sizes[after.start] > 100 for nbytes, after in zip(filled, parts[1:], strict=False))
