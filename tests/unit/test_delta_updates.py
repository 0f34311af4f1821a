"""Delta updates from real senders to real receivers: bit for bit equal to full updates, and full in case of doubt."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from delta_meeting import Rig, bits, fine, meetings

from asyncmoe.errors import WeightSyncError
from asyncmoe.reshard import DeltaDecoder, DeltaEncoder, Plan
from asyncmoe.weights import protocol
from asyncmoe.weights.protocol import Offer, Portion
from asyncmoe.weights.receiver import worker
from asyncmoe.weights.sender import deltas
from asyncmoe.weights.sender.deltas import common_base, unsupported
from tests.configs import minimal

Meet = Callable[..., Rig]


@pytest.fixture
def meeting() -> Iterator[Meet]:
    with meetings() as make:
        yield make


@pytest.fixture
def rig(meeting: Meet) -> Rig:
    """After a full update of version 1, and with a few other values than it."""
    made = meeting()
    made.send(1)
    made.change(0.01)
    return made


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_versions_in_a_row_are_what_the_trainer_has(meeting: Meet, transport: str, in_place: bool) -> None:
    rig = meeting(transport=transport, in_place=in_place)
    assert fine(rig.send(1))
    assert rig.wrong == []
    whole = rig.senders[0].traffic
    assert whole.nbytes > 2 * sum(tensor.nbytes for tensor in rig.values.values())
    places = {rank: [one.data_ptr() for one in model.parameters()] for rank, model in rig.workers.items()}
    for version, share in ((2, 0.01), (3, 0.0), (4, 0.1), (5, 1.0), (6, 0.01)):
        rig.change(share, version)
        held, seen = bits(rig), list[bool]()
        rig.before_commit = lambda seen=seen, held=held: seen.append(bits(rig) == held)  # type: ignore[misc]
        found = rig.send(version)
        assert fine(found), found
        assert seen == [not (in_place and version == 5)], "a delta is staged while the old weights stay"
        assert rig.wrong == []
        assert all(model.refreshed == version for model in rig.workers.values())
        if version == 2:
            sparse = rig.senders[0].traffic
            assert sparse.nbytes < whole.nbytes / 4
            assert 0.005 < (sparse.changed or 0.0) < 0.03
            assert places == {rank: [one.data_ptr() for one in model.parameters()] for rank, model in rig.workers.items()}
            assert not any(receiver._spare for receiver in rig.receivers), "a second copy is let go of"
    assert rig.kinds() == ["full", "delta of 1", "delta of 2", "delta of 3", "full", "delta of 5"]
    assert rig.staged_in_place() == [in_place, False, False, False, in_place, False]
    store = rig.senders[0].met.store
    assert [any(store.has(key) for key in protocol.passing(number, rig.terms)) for number in range(1, 7)] == [False] * 4 + [True] * 2


# ---------------------------------------------------------------- doubt


def decoder_of(rig: Rig, rank: int) -> DeltaDecoder:
    return worker._receivers[rig.workers[rank]]._decoder


def test_an_engine_that_missed_a_version_gets_everything(rig: Rig) -> None:
    """The delta is refused with the same words on every trainer rank and nothing written; then the version goes out in full."""
    decoder_of(rig, 3).version = 0
    before = bits(rig)
    (said,) = {str(one) for one in rig.send(2)}
    assert re.match(r"got a delta of version 1, but this rank has version 0 \(engine.0 rank 1 on .*, cpu\)", said)
    assert [sender.doubted for sender in rig.senders] == [True, True]
    assert len(rig.aborted()) == 1
    assert bits(rig) == before
    for version in (2, 3):
        assert fine(rig.send(version))
        assert rig.wrong == []
        rig.change(0.01, version)
    assert rig.kinds() == ["full", "delta of 1", "full", "delta of 2"]


def test_a_damaged_delta_is_followed_by_everything(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = DeltaDecoder.take

    def damaged(self: DeltaDecoder, source: int, number: int, address: int) -> int:
        taken = real(self, source, number, address)
        if self is decoder_of(rig, 4) and number == 0:
            place, nbytes = self._sources[source].coded[0]
            ctypes.c_uint8.from_address(place + nbytes // 2).value ^= 4
        return taken

    monkeypatch.setattr(DeltaDecoder, "take", damaged)
    assert re.match("from trainer rank .* to engine.1 rank 0: ", str(rig.send(2)[0]))
    monkeypatch.setattr(DeltaDecoder, "take", real)
    assert [sender.doubted for sender in rig.senders] == [True, True]
    assert fine(rig.send(2))
    assert rig.wrong == []
    assert rig.kinds() == ["full", "delta of 1", "full"]


def test_a_full_update_that_brings_something_else_is_no_version(meeting: Meet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages are intact, but a sender's bits do not match its digest."""
    rig, real = meeting(), deltas.offer

    def offer(encoder: DeltaEncoder, plan: Plan, version: int) -> Offer:
        made = real(encoder, plan, version)
        rig.sources[encoder.rank]["decoder.final_layernorm.weight"].view(torch.int16)[3] ^= 1
        return made

    monkeypatch.setattr(deltas, "offer", offer)
    assert "the bits of version 1 differ from those of " in str(rig.send(1)[0])
    assert [sender.doubted for sender in rig.senders] == [False, False]
    assert rig.wrong, "nothing was committed"


def test_a_rank_that_cannot_code_says_why_on_every_rank(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = deltas.offer

    def offer(encoder: DeltaEncoder, plan: Plan, version: int) -> Offer:
        if encoder.rank == 1:
            raise MemoryError("no room for the messages")
        return real(encoder, plan, version)

    monkeypatch.setattr(deltas, "offer", offer)
    (said,) = {str(one) for one in rig.send(2)}
    assert re.match("out of memory: no room for the messages.*trainer rank 1", said)
    monkeypatch.setattr(deltas, "offer", real)
    assert fine(rig.send(2))
    assert rig.kinds() == ["full", "failed", "full"]
    assert rig.wrong == []


@pytest.mark.parametrize("receiver", [False, True])
def test_a_rank_without_memory_for_a_delta_has_everything_sent(rig: Rig, monkeypatch: pytest.MonkeyPatch, receiver: bool) -> None:
    codec: Any = decoder_of(rig, 3) if receiver else rig.senders[1]._encoder
    room = codec._work.room

    def full(name: Any, nbytes: int) -> int:
        if name[0] == "coded":
            raise MemoryError("no room")
        return int(room(name, nbytes))

    monkeypatch.setattr(codec._work, "room", full)
    assert fine(rig.send(2)) != receiver, "a receiver refuses the delta, and the version is sent again"
    assert fine(rig.send(2))
    assert rig.wrong == []


def test_a_commit_that_failed_is_followed_by_everything(rig: Rig) -> None:
    """Only some engines then have the version."""

    def refuse() -> None:
        raise WeightSyncError("publishing version 2: checksums differ")

    rig.before_commit = refuse
    assert "checksums differ" in str(rig.send(2)[0])
    rig.before_commit = lambda: None
    rig.change(0.01, 3)
    assert fine(rig.send(3))
    assert rig.kinds() == ["full", "delta of 1", "full"]
    assert rig.wrong == []


def test_what_a_full_update_has_written_in_part_is_no_version(rig: Rig) -> None:
    rig.change(1.0)
    rig.senders[1]._exchanger.close()
    assert not fine(rig.send(2))
    assert {decoder_of(rig, rank).version for rank in rig.workers} == {None}


def test_an_engine_that_joins_meets_all_anew_and_all_get_everything(rig: Rig, meeting: Meet) -> None:
    assert fine(rig.send(2))
    rig.end()
    second = meeting(workers=rig.workers)
    second.change(0.01)
    assert fine(second.send(3))
    assert second.kinds() == ["full"]
    assert second.wrong == []


# ---------------------------------------------------------------- the decision


@pytest.mark.parametrize(
    ("offers", "base"),
    [
        ([Offer(base=3, parts={2: Portion(1000, (100, 200), 1)}), Offer(base=3, parts={2: Portion(500, (300,), 1)})], 3),
        ([Offer(base=3, parts={2: Portion(1000, (100, 351), 1)}), Offer(base=3, parts={2: Portion(500, (300,), 1)})], None),
        ([Offer(base=3, parts={2: Portion(1000, (1,), 1), 3: Portion(100, (51,), 1)})], None),
        ([Offer(base=3, parts={2: Portion(1000, (1,), 1)}), Offer(parts={2: Portion(1000, (), 1)})], None),
        ([Offer(base=3, parts={2: Portion(1000, (1,), 1)}), Offer(base=2, parts={2: Portion(1000, (1,), 1)})], None),
        ([Offer(base=0, parts={2: Portion(1000, (1,), 1)}), Offer(base=0)], 0),
    ],
)
def test_an_update_is_a_delta_of_what_all_have_and_where_it_is_small(offers: list[Offer], base: int | None) -> None:
    assert common_base(dict(enumerate(offers))) == base


@pytest.mark.parametrize(("train", "method"), [("full", "reshard"), ("lora", "reshard"), ("full", "broadcast")])
def test_where_updates_stay_full_the_reason_is_known(train: str, method: str) -> None:
    reason = unsupported(minimal(train=train, sync={"delta": "auto", "method": method}))
    assert (reason == "") == ((train, method) == ("full", "reshard"))
