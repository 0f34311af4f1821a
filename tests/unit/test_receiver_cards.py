"""Refusals at a rendezvous of GPUs, in one line each."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from asyncmoe.errors import UserError
from asyncmoe.models import MegatronParallel
from asyncmoe.reshard.nccl import Origin
from asyncmoe.rpc import nics
from asyncmoe.weights.protocol import Card, EngineRanks, Ready, Terms
from asyncmoe.weights.receiver import cards, handshake
from asyncmoe.weights.receiver.cards import card_of, in_place, unfit
from asyncmoe.weights.sender import rendezvous

H100 = Card("host-a", "cuda:0", "GPU-0", 70 << 30, 80 << 30, 30 << 30, "2.30.7", "/venv/libnccl.so.2")
ENGINES = (EngineRanks("engine.0", 2, 1, 3), EngineRanks("engine.1", 1, 1, 5))
TERMS = Terms({}, None, MegatronParallel(), ENGINES, "bfloat16", "bfloat16", "nccl", "s", 1, 1.0)
IPC = msgspec.structs.replace(TERMS, transport="ipc")


def changed(ranks: tuple[int, ...], **changes: Any) -> dict[int, Card]:
    return {rank: msgspec.structs.replace(H100, **changes) if rank in ranks else H100 for rank in range(6)}


def test_equal_devices_and_cpus_are_taken() -> None:
    assert unfit(changed(()), TERMS) == unfit({}, TERMS) == unfit(changed(tuple(range(6)), nccl="", library=""), TERMS) == []
    assert card_of(torch.device("cpu"), TERMS, 0) is None


def test_two_versions_of_nccl_are_named_with_who_has_them_and_where() -> None:
    (found,) = unfit(changed((3, 4), host="host-b", nccl="2.29.7", library="/venv-engine/libnccl.so.2"), TERMS)
    for words in ("2.30.7 (", "on host-a, /venv/libnccl.so.2)", "2.29.7 (engine.0 rank ", "on host-b, /venv-engine/libnccl.so.2)"):
        assert words in found


def test_a_host_that_nccl_would_reach_over_another_network_is_named() -> None:
    cards = changed((3, 4), host="host-b", network="TCP") | {0: msgspec.structs.replace(H100, network="InfiniBand")}
    (found,) = unfit(cards, TERMS)
    for words in ("InfiniBand (trainer rank 0 on host-a)", "TCP (engine.0 rank 1 on host-b)"):
        assert words in found


def test_a_card_too_small_to_receive_in_place_is_refused() -> None:
    (line,) = unfit(changed((4,), host="gpu7", device="cuda:3", free=12 << 30, copy=40 << 30), TERMS)
    for words in ("engine.0 rank 1 on gpu7, cuda:3", "12.00 GiB free of 80.00 GiB", "30.00 GiB", "sync.bucket_bytes"):
        assert words in line


def test_weights_are_written_in_place_unless_all_cards_have_room_for_a_second_copy() -> None:
    assert not in_place(changed((), copy=40 << 30))
    found = changed((4,), copy=40 << 30, free=60 << 30)
    assert in_place(found)
    assert unfit(found, TERMS) == []


def test_gpus_that_do_not_reach_each_other_are_refused_for_ipc() -> None:
    """Only of an engine that reads a trainer's memory, and on one host."""
    ranks = {rank: msgspec.structs.replace(H100, device=f"cuda:{rank}", uuid=f"GPU-{rank}") for rank in range(6)}
    ranks[3] = msgspec.structs.replace(ranks[3], unreachable=("GPU-0", "GPU-4"))
    for trainer, other in ((0, "GPU-3"), (1, "GPU-0")):
        ranks[trainer] = msgspec.structs.replace(ranks[trainer], unreachable=(other,))
    (line,) = unfit(ranks, IPC)
    assert "from engine.0 rank 0's cuda:3 to trainer rank 0's cuda:0" in line
    assert unfit(ranks, TERMS) == unfit({**ranks, 0: msgspec.structs.replace(ranks[0], host="gpu8")}, IPC) == []


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six GPUs, of which the fourth cannot read the first."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 << 30)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: (device.index, other) != (3, 0))


@pytest.mark.usefixtures("gpus")
def test_a_rank_says_what_its_card_and_its_library_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "origin", lambda: Origin(23007, "/x/libnccl.so.2"))
    monkeypatch.setattr(nics, "here", lambda: "TCP")
    mine = Card(socket.gethostname(), "cuda:3", "GPU-3", 12 << 30, 80 << 30, 5, "2.30.7", "/x/libnccl.so.2", ("GPU-0",), network="TCP")
    assert card_of(torch.device("cuda:3"), TERMS, 5) == mine

    def missing() -> Origin:
        raise UserError("NCCL (libnccl.so.2)", got="nothing", expected="NVIDIA's NCCL")

    monkeypatch.setattr(cards, "origin", missing)
    with pytest.raises(UserError, match="NCCL"):
        card_of(torch.device("cuda:3"), TERMS, 5)
    assert card_of(torch.device("cuda:3"), IPC, 5) == msgspec.structs.replace(mine, nccl="", library="", network="")


@pytest.mark.usefixtures("gpus")
def test_cards_that_do_not_do_end_the_meeting_as_other_parameters_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without room, and one that cannot read the trainer's, from what CUDA says of them."""
    monkeypatch.setattr(handshake, "differences", lambda _, engine, tp_rank, layout: [f"{engine.name} {tp_rank} {layout.rank}"])
    monkeypatch.setattr(rendezvous.transfer_plan, "engine_layouts", lambda _: [SimpleNamespace(rank=rank) for rank in range(3, 6)])
    ready = {rank: Ready(plan="same", card=card_of(torch.device(f"cuda:{rank}"), IPC, (20 << 30) * (rank == 4))) for rank in range(6)}
    short, apart, *others = rendezvous._differences(IPC, ready, {})
    assert short.startswith("engine.0 rank 1 on ")
    assert "from engine.0 rank 0's cuda:3 to trainer rank 0's cuda:0" in apart
    assert others == ["engine.0 0 3", "engine.0 1 4", "engine.1 0 5"]
