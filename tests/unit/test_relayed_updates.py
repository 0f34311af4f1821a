"""Updates that engines of equal layout pass on to each other: bit by bit what the trainer has, and the trainer sends each byte once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from delta_meeting import HF, TRAINER, Rig, fine, meetings
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.errors import TransferError
from asyncmoe.models import EngineParallel, MegatronParallel
from asyncmoe.models.payload import Payload
from asyncmoe.receiver import transfer_plan, worker
from asyncmoe.receiver.protocol import EngineRanks, Terms
from asyncmoe.reshard import Exchanger, relay
from asyncmoe.reshard.carry import Carrier
from asyncmoe.reshard.delta_relay import firsthand, from_source, holder, in_order, secondhand
from asyncmoe.reshard.relay import replicas
from asyncmoe.reshard.torch_transport import TorchTransport

Meet = Callable[..., Rig]
THREE = tuple(EngineRanks(f"engine.{i}", 1, 1, 2 + i) for i in range(3))
PAIRS = tuple(EngineRanks(f"engine.{i}", 2, 2, 2 + 2 * i) for i in range(3))
MIXED = (*PAIRS[:2], EngineRanks("engine.2", 1, 1, 6))
TRAINERS = (0, 1)


@pytest.fixture
def meeting() -> Iterator[Meet]:
    with meetings() as make:
        yield lambda engines, **how: make(transport="gloo", engines=engines, relay=True, **how)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Bytes that each rank has posted, whatever they are."""
    found: Counter[int] = Counter()
    real = TorchTransport._post

    def counted(self: TorchTransport, sends: Any, receives: Any) -> Any:
        found[self.rank] += sum(buffer.nbytes for _, buffer in sends)
        return real(self, sends, receives)

    monkeypatch.setattr(TorchTransport, "_post", counted)
    return found


@pytest.mark.parametrize("engines", [THREE, PAIRS, MIXED], ids=["three", "pairs", "mixed"])
def test_versions_in_a_row_are_what_the_trainer_has(meeting: Meet, sent: Counter[int], engines: tuple[EngineRanks, ...]) -> None:
    rig = meeting(engines)
    whole = 0
    for version, share in ((1, 0.0), (2, 0.01), (3, 0.0), (4, 1.0), (5, 0.02)):
        if share:
            rig.change(share, version)
        sent.clear()
        found = rig.send(version)
        assert fine(found), found
        assert rig.wrong == []
        assert all(model.refreshed == version for model in rig.workers.values())
        told = rig.senders[0].traffic
        assert told is not None
        ours, theirs = sum(sent[rank] for rank in TRAINERS), sum(sent.values()) - sum(sent[rank] for rank in TRAINERS)
        if version == 1:
            whole = ours
            once = sum(tensor.nbytes for tensor in rig.values.values())
            kinds = len({(one.tp, one.ep) for one in engines})
            assert kinds * once <= ours < kinds * 1.5 * once  # norms and routers go to every rank of an engine
        if version in (2, 5):
            assert ours < whole / 4
        if share and engines is not MIXED:
            assert told.nbytes <= ours + theirs < 1.05 * told.nbytes + 5000, "the metric counts what all engines get"
            assert theirs == pytest.approx((len(engines) - 1) * ours, rel=0.1), "each replica passes on a share of it"
    assert rig.kinds() == ["full", "delta of 1", "delta of 2", "full", "delta of 4"]


def test_full_updates_of_a_run_without_deltas_are_relayed_too(meeting: Meet, sent: Counter[int]) -> None:
    rig = meeting(THREE, delta=False)
    for version in (1, 2):
        rig.change(0.5, version)
        sent.clear()
        assert fine(rig.send(version))
        assert rig.wrong == []
        once = sum(tensor.nbytes for tensor in rig.values.values())
        assert once <= sum(sent[rank] for rank in TRAINERS) < 1.1 * once
    assert rig.kinds() == ["full", "full"]


def test_a_replica_that_cannot_pass_on_ends_the_update_and_the_next_one_succeeds(meeting: Meet, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = meeting(THREE)
    assert fine(rig.send(1))
    before = {rank: [one.clone() for one in model.parameters()] for rank, model in rig.workers.items()}
    rig.change(1.0, 1)
    real = Exchanger._pack_round

    def lost(self: Exchanger, number: int, moved: Any) -> None:
        if self.rank == 3:
            raise TransferError(3, 4, "its card broke")
        real(self, number, moved)

    monkeypatch.setattr(Exchanger, "_pack_round", lost)
    found = rig.send(2)
    assert {str(one) for one in found} == {str(found[0])}
    assert "from engine.1 rank 0 to engine.2 rank 0: its card broke" in str(found[0])
    for rank, model in rig.workers.items():
        pairs = zip(before[rank], model.parameters(), strict=True)
        assert all(a.view(torch.int16).equal(b.view(torch.int16)) for a, b in pairs), "nothing was written"
    monkeypatch.setattr(Exchanger, "_pack_round", real)
    assert fine(rig.send(2))
    assert rig.wrong == []


@pytest.mark.parametrize("replica", [2, 3])
def test_a_delta_damaged_on_its_way_through_a_replica_is_followed_by_everything(
    meeting: Meet, monkeypatch: pytest.MonkeyPatch, replica: int
) -> None:
    """It is passed on as it came, and each replica that gets it damaged refuses it."""
    rig = meeting(THREE)
    assert fine(rig.send(1))
    rig.change(0.01, 1)
    real = Carrier.run

    def damaged(self: Carrier, outgoing: Any, incoming: Any, take: Any, timeout_s: float = 300.0) -> None:
        if replica in incoming or not any(source in TRAINERS for source in incoming):
            real(self, outgoing, incoming, take, timeout_s)
            return

        def wrong(source: int, message: np.ndarray) -> None:
            if self._transport.rank == replica:  # type: ignore[union-attr]
                message[len(message) // 2] ^= 1
            take(source, message)

        real(self, outgoing, incoming, wrong, timeout_s)

    monkeypatch.setattr(Carrier, "run", damaged)
    found = rig.send(2)
    assert [sender.doubted for sender in rig.senders] == [True, True], found
    assert "message 1 of a delta" in str(found[0])
    monkeypatch.setattr(Carrier, "run", real)
    assert fine(rig.send(2))
    assert rig.wrong == []
    assert rig.kinds() == ["full", "delta of 1", "full"]


def test_a_replica_that_holds_other_bits_says_its_own_name(meeting: Meet) -> None:
    rig = meeting(THREE)
    assert fine(rig.send(1))
    rig.change(0.01, 1)
    receiver = worker._receivers[rig.workers[4]]
    assert receiver._deltas is not None
    rig.workers[4].get_parameter("model.norm.weight").data.view(torch.int16)[:] ^= 1
    found = rig.send(2)
    assert [sender.doubted for sender in rig.senders] == [True, True], found
    assert "to engine.2 rank 0:" in str(found[0])


# ---------------------------------------------------------------- who gets what from whom


@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=5), ranks=st.integers(2, 5), first=st.integers(5, 9))
def test_every_replica_gets_every_message_once_and_no_source_sends_one_twice(counts: list[int], ranks: int, first: int) -> None:
    group = tuple(range(first, first + ranks))
    every = {(source, number) for source, count in enumerate(counts) for number in range(count)}
    by_source = dict(enumerate(counts))
    for source, count in by_source.items():
        messages = [np.array([source, number]) for number in range(count)]
        out = from_source(source, messages, group)
        for rank in group:
            assert [tuple(one.tolist()) for one in out[rank]] == firsthand(rank, by_source, group)[source]
        assert sum(map(len, out.values())) == count
    for rank in group:
        own = in_order(firsthand(rank, by_source, group))
        others = secondhand(rank, by_source, group)
        assert rank not in others
        assert sorted([*own, *(one for several in others.values() for one in several)]) == sorted(every)
        assert all(several == in_order(firsthand(other, by_source, group)) for other, several in others.items())
        assert all(holder(one, group) == rank for one in own)


@pytest.mark.parametrize("engines", [THREE, PAIRS, MIXED], ids=["three", "pairs", "mixed"])
def test_ranks_agree_on_their_peers(engines: tuple[EngineRanks, ...]) -> None:
    terms = _terms(engines)
    plans = {rank: transfer_plan.update_plans(terms, rank, transfer_plan.route(terms, rank)) for rank in range(terms.world)}
    assert len({one.delta.digest for one in plans.values()}) == 1
    assert len({tuple(round_.digest for round_ in one.full) for one in plans.values()}) == 1
    to = {(rank, other) for rank, one in plans.items() for other in one.peers(rank)[0]}
    by = {(other, rank) for rank, one in plans.items() for other in one.peers(rank)[1]}
    assert to == by
    assert all(rank != other for rank, other in to)
    for rank in range(2, terms.world):
        assert plans[rank].first(rank) in plans[rank].replicas
        assert rank in plans[rank].replicas[plans[rank].first(rank)]


# ---------------------------------------------------------------- when it is faster


@pytest.mark.parametrize(
    ("engines", "hosts", "faster"),
    [
        (THREE, ["a", "b", "c", "d", "e"], True),  # 3 engine ranks for 2 trainer ranks
        (THREE[:2], ["a", "b", "c", "d"], False),  # as many
        (THREE[:1], ["a", "b", "c"], False),
        (THREE, ["a"] * 5, False),
        (THREE, ["a", "a", "a", "b", "c"], True),  # two engines away from the trainer's host
        (THREE, ["a", "a", "b", "b", "b"], True),  # those of one host pass on within it
        (THREE, ["a", "a", "a", "a", "b"], False),
        (PAIRS, ["a", "a", "b", "b", "c", "c", "d", "d"], True),
    ],
)
def test_replicas_relay_where_the_network_cards_make_that_faster(engines: tuple[EngineRanks, ...], hosts: list[str], faster: bool) -> None:
    terms = _terms(engines)
    assert transfer_plan.relay_faster(terms, transfer_plan.route(terms, 0), dict(enumerate(hosts))) is faster


def test_replicas_are_ranks_of_equal_layout() -> None:
    terms = _terms(MIXED)
    assert replicas(transfer_plan.route(terms, 0)) == {2: (2, 4), 3: (3, 5), 6: (6,)}
    payload = Payload(HF)
    rounds = relay(
        payload.tensors(),
        payload.trainer(MegatronParallel(**TRAINER), "bfloat16"),  # type: ignore[arg-type]
        payload.engines(EngineParallel(1, 1), "bfloat16", first=2),
    )
    assert len(rounds) == 1


def _terms(engines: tuple[EngineRanks, ...]) -> Terms:
    return Terms(HF, None, dict(TRAINER), engines, "bfloat16", "bfloat16", "gloo", "x", "full", 20_000, 5.0, delta=True, relay=True)
