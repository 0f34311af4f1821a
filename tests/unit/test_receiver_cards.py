"""What is refused at a meeting of GPUs, in one line each."""

from __future__ import annotations

import re
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from fake_nccl import built

from asyncmoe.errors import UserError
from asyncmoe.reshard.nccl import Origin, origin
from asyncmoe.weights.protocol import Card, EngineRanks, Ready, Terms
from asyncmoe.weights.receiver import card as cards_of_ranks
from asyncmoe.weights.receiver import handshake
from asyncmoe.weights.receiver.card import card_of
from asyncmoe.weights.receiver.cards import in_place, unfit
from asyncmoe.weights.sender import rendezvous

H100 = Card(
    "host-a",
    "cuda:0",
    "GPU-0",
    "NVIDIA H100 80GB HBM3 (sm_90)",
    70 << 30,
    80 << 30,
    30 << 30,
    "2.14.1+cu130",
    "2.30.7",
    "/venv/libnccl.so.2",
)
TERMS = Terms(
    {}, None, {}, (EngineRanks("engine.0", 2, 1, 3), EngineRanks("engine.1", 1, 1, 5)), "bfloat16", "bfloat16", "nccl", "s", 1, 1.0
)


def changed(ranks: tuple[int, ...], **changes: Any) -> dict[int, Card]:
    return {rank: msgspec.structs.replace(H100, **changes) if rank in ranks else H100 for rank in range(6)}


def test_equal_devices_and_cpus_are_taken() -> None:
    assert unfit(changed(()), TERMS) == []
    assert unfit({}, TERMS) == []
    assert card_of(torch.device("cpu"), TERMS, 0) is None


def test_two_versions_of_nccl_are_named_with_who_has_them_and_where() -> None:
    found = unfit(changed((3, 4), host="host-b", nccl="2.29.7", library="/venv-engine/libnccl.so.2"), TERMS)
    assert found == [
        "NCCL: got 2.30.7 (trainer ranks 0-2 on host-a, /venv/libnccl.so.2; engine.1 rank 0 on host-a, /venv/libnccl.so.2) and "
        "2.29.7 (engine.0 ranks 0-1 on host-b, /venv-engine/libnccl.so.2), expected one; install the same torch and nvidia-nccl in both "
        "environments, or set sync.transport=ipc on one machine"
    ]


def test_versions_do_not_matter_where_nccl_carries_nothing() -> None:
    assert unfit(changed(tuple(range(6)), nccl="", library=""), TERMS) == []


@pytest.mark.parametrize(
    ("ranks", "changes", "said"),
    [
        ((1,), {"model": "NVIDIA A100 (sm_80)"}, r"the cards of the trainer: got .*H100.*ranks 0, 2.*and NVIDIA A100 \(sm_80\).*rank 1 on"),
        ((4,), {"model": "NVIDIA H200 (sm_90)"}, r"the cards of engine\.0: got .*rank 0 .*and NVIDIA H200 .*rank 1.*one kind of card"),
        (
            (2,),
            {"torch": "2.13.0", "host": "host-c"},
            r"torch of the trainer: got 2\.14\.1\+cu130 .*and 2\.13\.0 \(trainer rank 2 on",
        ),
    ],
)
def test_what_computes_together_is_of_one_kind(ranks: tuple[int, ...], changes: dict[str, str], said: str) -> None:
    (found,) = unfit(changed(ranks, **changes), TERMS)
    assert re.match(said, found), found


def test_an_engine_of_other_cards_than_the_trainers_is_taken() -> None:
    assert unfit(changed((5,), model="NVIDIA A100 (sm_80)"), TERMS) == []


def test_a_card_too_small_to_receive_in_place_is_refused() -> None:
    (line,) = unfit(changed((4,), host="gpu7", device="cuda:3", free=12 << 30, copy=40 << 30), TERMS)
    assert line.startswith(
        "engine.0 rank 1 on gpu7, cuda:3: memory to receive weights in: got 12.00 GiB free of 80.00 GiB, expected 30.00 GiB; "
    )
    assert "sync.bucket_bytes" in line


def test_weights_are_written_in_place_unless_all_cards_have_room_for_a_second_copy() -> None:
    assert not in_place(changed((), copy=40 << 30))
    cards = changed((4,), copy=40 << 30, free=60 << 30)
    assert in_place(cards)
    assert unfit(cards, TERMS) == []
    assert not in_place({})


def test_gpus_that_do_not_reach_each_other_are_refused_for_ipc() -> None:
    """Only of an engine that reads a trainer's memory, and on one host."""
    ranks = {rank: msgspec.structs.replace(H100, device=f"cuda:{rank}", uuid=f"GPU-{rank}") for rank in range(6)}
    ranks[3] = msgspec.structs.replace(ranks[3], unreachable=("GPU-0", "GPU-4"))
    ranks[0] = msgspec.structs.replace(ranks[0], unreachable=("GPU-3",))
    ipc = msgspec.structs.replace(TERMS, transport="ipc")
    (line,) = unfit(ranks, ipc)
    assert "got no peer access from engine.0 rank 0's cuda:3 to trainer rank 0's cuda:0" in line
    assert "sync.transport=nccl" in line
    assert unfit(ranks, TERMS) == []
    assert unfit({**ranks, 0: msgspec.structs.replace(ranks[0], host="gpu8")}, ipc) == []


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six GPUs, of which the fourth cannot read the first."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 << 30)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: (device.index, other) != (3, 0))


@pytest.mark.usefixtures("gpus")
def test_a_rank_says_what_its_card_and_its_libraries_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards_of_ranks, "origin", lambda: Origin(23007, "/x/libnccl.so.2"))
    found = card_of(torch.device("cuda:3"), TERMS, 5)
    assert found == Card(
        host=socket.gethostname(),
        device="cuda:3",
        uuid="GPU-3",
        model="NVIDIA H100 (sm_90)",
        free=12 << 30,
        total=80 << 30,
        wanted=5,
        torch=str(torch.__version__),
        nccl="2.30.7",
        library="/x/libnccl.so.2",
        unreachable=("GPU-0",),
    )

    def missing() -> Origin:
        raise UserError("NCCL (libnccl.so.2)", got="nothing", expected="NVIDIA's NCCL")

    monkeypatch.setattr(cards_of_ranks, "origin", missing)
    with pytest.raises(UserError, match="NCCL"):
        card_of(torch.device("cuda:3"), TERMS, 5)
    by_ipc = card_of(torch.device("cuda:3"), msgspec.structs.replace(TERMS, transport="ipc"), 5)
    assert by_ipc is not None
    assert by_ipc.nccl == ""


@pytest.mark.parametrize(("code", "words"), [(23007, "2.30.7"), (22907, "2.29.7"), (21403, "2.14.3")])
def test_versions_are_written_as_people_do(code: int, words: str) -> None:
    assert Origin(code, "").words == words


def verdict(monkeypatch: pytest.MonkeyPatch, terms: Terms, cards: dict[int, Card | None]) -> list[str]:
    """What rank 0 ends a meeting with, of ranks that agree on all but their cards."""
    monkeypatch.setattr(handshake, "differences", lambda *_: [])
    monkeypatch.setattr(rendezvous.transfer_plan, "engine_layouts", lambda _: [SimpleNamespace(rank=rank) for rank in range(3, 6)])
    return rendezvous._differences(terms, {rank: Ready(plan="same", card=card) for rank, card in cards.items()}, {})


@pytest.mark.usefixtures("gpus")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to build the stand-in with")
def test_libraries_of_two_versions_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From what the libraries themselves say to the line that rank 0 ends the meeting with."""
    found = {}
    for rank in range(6):
        library = tmp_path / ("engine.so" if rank == 5 else "trainer.so")
        if not library.exists():
            built(library)
        monkeypatch.setenv("FAKE_NCCL_VERSION", "22907" if rank == 5 else "23007")
        monkeypatch.setattr(cards_of_ranks, "origin", lambda path=str(library): origin(path))
        found[rank] = card_of(torch.device(f"cuda:{rank}"), TERMS, 0)
    (said,) = verdict(monkeypatch, TERMS, found)
    assert said.startswith("NCCL: got 2.30.7 (trainer ranks 0-2 on ")
    assert f"and 2.29.7 (engine.1 rank 0 on {socket.gethostname()}, {tmp_path}/engine.so), expected one; install" in said


@pytest.mark.usefixtures("gpus")
def test_cards_that_do_not_do_end_the_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without room, and one that cannot read the trainer's, from what CUDA says of them."""
    ipc = msgspec.structs.replace(TERMS, transport="ipc")
    wanted = {3: 1 << 30, 4: 20 << 30}
    found = {rank: card_of(torch.device(f"cuda:{rank}"), ipc, wanted.get(rank, 0)) for rank in range(6)}
    short, apart = verdict(monkeypatch, ipc, found)
    assert short.startswith("engine.0 rank 1 on ")
    assert "got 12.00 GiB free of 80.00 GiB, expected 20.00 GiB" in short
    assert "from engine.0 rank 0's cuda:3 to trainer rank 0's cuda:0" in apart
    assert verdict(monkeypatch, TERMS, dict.fromkeys(range(6))) == []
