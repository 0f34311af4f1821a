"""Updates that are deltas, from real senders to real receivers: bit by bit what full updates bring, and full where anything is in doubt."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from delta_meeting import Rig, fine, meetings

from asyncmoe.config import parse
from asyncmoe.errors import TransferError, WeightSyncError
from asyncmoe.reshard import DeltaDecoder
from asyncmoe.weights.receiver import delta_messages, worker
from asyncmoe.weights.receiver.delta_messages import Offer, Portion
from asyncmoe.weights.receiver.deltas import DeltaStaging
from asyncmoe.weights.sender.deltas import DeltaSource, common_base, unsupported

Meet = Callable[..., Rig]
NORM = "final_norm"
"""A tensor of 32 elements; in engines model.norm.weight."""


@pytest.fixture
def meeting() -> Iterator[Meet]:
    with meetings() as make:
        yield make


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_versions_in_a_row_are_what_the_trainer_has(meeting: Meet, transport: str, in_place: bool) -> None:
    rig = meeting(transport=transport, in_place=in_place)
    assert fine(rig.send(1))
    assert rig.wrong == []
    whole = rig.senders[0].traffic
    assert whole is not None
    assert whole.nbytes > 2 * sum(tensor.nbytes for tensor in rig.values.values())
    places = {rank: [one.data_ptr() for one in model.parameters()] for rank, model in rig.workers.items()}
    for version, share in ((2, 0.01), (3, 0.0), (4, 0.1), (5, 1.0), (6, 0.01)):
        rig.change(share, version)
        assert rig.wrong, "nothing is written before"
        found = rig.send(version)
        assert fine(found), found
        assert rig.wrong == []
        assert all(model.refreshed == version for model in rig.workers.values())
        if version == 2:
            sparse = rig.senders[0].traffic
            assert sparse is not None
            assert sparse.nbytes < whole.nbytes / 4
            assert 0.005 < (sparse.changed or 0.0) < 0.03
            assert places == {rank: [one.data_ptr() for one in model.parameters()] for rank, model in rig.workers.items()}
            assert not any(receiver._spare for receiver in rig.receivers), "a second copy is let go of"
    assert rig.kinds() == ["full", "delta of 1", "delta of 2", "delta of 3", "full", "delta of 5"]
    assert rig.staged_in_place() == [in_place, False, False, False, in_place, False]
    store = rig.senders[0].met.store
    assert [any(store.has(key) for key in delta_messages.keys(number, rig.terms)) for number in range(1, 7)] == [False] * 4 + [True] * 2


def bits(rig: Rig) -> list[bytes]:
    """Of all parameters of all engine ranks."""
    return [one.view(torch.int16).numpy().tobytes() for model in rig.workers.values() for one in model.parameters()]


def test_a_delta_is_staged_while_the_old_weights_stay(meeting: Meet) -> None:
    rig = meeting(in_place=True)
    rig.send(1)
    rig.change(0.01)
    held, seen = bits(rig), []
    rig.before_commit = lambda: seen.append(bits(rig) == held)
    assert fine(rig.send(2))
    assert seen == [True]
    assert rig.wrong == []


# ---------------------------------------------------------------- what is in doubt


def staging_of(rig: Rig, rank: int) -> DeltaStaging:
    found = worker._receivers[rig.workers[rank]]._deltas
    assert found is not None
    return found


def doubted(rig: Rig, version: int, said: str) -> None:
    """The version is refused as a delta, with the same words on every trainer rank and nothing written; then it goes out in full."""
    before = bits(rig)
    found = rig.send(version)
    assert len({str(one) for one in found}) == 1
    assert re.search(said, str(found[0])), found[0]
    assert [sender.doubted for sender in rig.senders] == [True, True]
    assert len(rig.aborted()) == 1
    assert bits(rig) == before
    found = rig.send(version)
    assert fine(found), found
    assert rig.wrong == []
    assert rig.kinds()[-2:] == [f"delta of {version - 1}", "full"]
    rig.change(0.01, 99)
    assert fine(rig.send(version + 1))
    assert rig.wrong == []
    assert rig.kinds()[-1] == f"delta of {version}"


def flip(rig: Rig, rank: int, name: str = "model.norm.weight") -> None:
    rig.workers[rank].get_parameter(name).data.view(torch.int16)[3] ^= 1


def test_an_engine_that_missed_a_version_gets_everything(meeting: Meet) -> None:
    rig = meeting()
    rig.send(1)
    staging_of(rig, 3)._held.version = 0
    rig.change(0.01)
    doubted(rig, 2, r"a delta of version 1 came, but this rank holds version 0 \(engine.0 rank 1 on .*, cpu\)")


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_damaged_delta_is_followed_by_everything(meeting: Meet, monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    rig = meeting(transport=transport)
    rig.send(1)
    rig.change(0.01)
    real = DeltaDecoder.take

    def damaged(self: DeltaDecoder, source: int, number: int, address: int) -> None:
        real(self, source, number, address)
        if self is staging_of(rig, 4)._held and number == 0:
            place, nbytes = self._sources[source].coded[0]
            ctypes.c_uint8.from_address(place + nbytes // 2).value ^= 4

    monkeypatch.setattr(DeltaDecoder, "take", damaged)
    found = rig.send(2)
    assert "from trainer rank" in str(found[0])
    assert "to engine.1 rank 0: " in str(found[0])
    monkeypatch.setattr(DeltaDecoder, "take", real)
    assert [sender.doubted for sender in rig.senders] == [True, True]
    assert fine(rig.send(2))
    assert rig.wrong == []
    assert rig.kinds() == ["full", "delta of 1", "full"]


def test_memory_that_changes_between_proof_and_commit_ends_the_worker(meeting: Meet) -> None:
    rig = meeting()
    rig.send(1)
    rig.values[NORM][3] ^= 2
    rig.refill()
    rig.before_commit = lambda: flip(rig, 4)
    with pytest.raises(TransferError, match="changed while it was written"):  # SGLang then fails the request, and the engine is fenced
        raise rig.send(2)[0]
    assert [sender.doubted for sender in rig.senders] == [False, False]


def test_a_full_update_that_brings_something_else_is_no_version(meeting: Meet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages are whole, but a sender's bits are not those of which it says the digest."""
    rig = meeting()
    real = DeltaSource.offer

    def offer(self: DeltaSource, version: int) -> Offer:
        made = real(self, version)
        rig.sources[self._encoder.rank]["decoder.final_layernorm.weight"].view(torch.int16)[3] ^= 1
        return made

    monkeypatch.setattr(DeltaSource, "offer", offer)
    found = rig.send(1)
    assert re.search("version 1 has other bits than ", str(found[0]))
    assert [sender.doubted for sender in rig.senders] == [False, False]
    assert rig.wrong, "nothing was committed"


def test_a_rank_that_cannot_code_says_why_on_every_rank(meeting: Meet, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = meeting()
    rig.send(1)
    real = DeltaSource.offer

    def offer(self: DeltaSource, version: int) -> Offer:
        if self._encoder.rank == 1:
            raise MemoryError("no room for the messages")
        return real(self, version)

    monkeypatch.setattr(DeltaSource, "offer", offer)
    found = rig.send(2)
    assert len({str(one) for one in found}) == 1
    assert str(found[0]).startswith("out of memory: no room for the messages")
    assert "trainer rank 1" in str(found[0])
    monkeypatch.setattr(DeltaSource, "offer", real)
    rig.change(0.01)
    assert fine(rig.send(2))
    assert rig.kinds() == ["full", "failed", "full"]
    assert rig.wrong == []


@pytest.mark.parametrize("receiver", [False, True])
def test_a_rank_without_memory_for_a_delta_has_everything_sent(meeting: Meet, monkeypatch: pytest.MonkeyPatch, receiver: bool) -> None:
    rig = meeting()
    rig.send(1)
    rig.change(0.01)
    source = rig.senders[1]._deltas
    assert source is not None
    work: Any = staging_of(rig, 3)._held._work if receiver else source._encoder._work
    room = work.room

    def full(name: Any, nbytes: int) -> int:
        if name[0] == "coded":
            raise MemoryError("no room")
        return int(room(name, nbytes))

    monkeypatch.setattr(work, "room", full)
    assert fine(rig.send(2)) != receiver, "a receiver refuses the delta, and the version is sent again"
    assert fine(rig.send(2))
    assert rig.wrong == []


def test_a_commit_that_failed_is_followed_by_everything(meeting: Meet) -> None:
    """Some engines have the version then, others do not."""
    rig = meeting()
    rig.send(1)
    rig.change(0.01)

    def refuse() -> None:
        raise WeightSyncError("publishing version 2: checksums differ")

    rig.before_commit = refuse
    assert "checksums differ" in str(rig.send(2)[0])
    rig.before_commit = lambda: None
    rig.change(0.01, 3)
    assert fine(rig.send(3))
    assert rig.kinds() == ["full", "delta of 1", "full"]
    assert rig.wrong == []


def test_an_engine_that_joins_meets_all_anew_and_all_get_everything(meeting: Meet) -> None:
    first = meeting()
    first.send(1)
    first.change(0.01)
    assert fine(first.send(2))
    first.end()
    second = meeting(workers=first.workers)
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


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"sync": {"delta": "auto"}}, ""),
        ({"sync": {"delta": "auto"}, "train": "lora"}, "adapters are sent whole"),
        ({"sync": {"delta": "auto", "method": "broadcast"}}, "sync.method is broadcast"),
    ],
)
def test_where_updates_stay_full_the_reason_is_known(values: dict[str, Any], said: str) -> None:
    asked = {"run": {"dir": "runs/x", "steps": 3}, "model": {"path": "m"}, "task": {"kind": "arithmetic"}, **values}
    assert unsupported(parse(asked)) == said
