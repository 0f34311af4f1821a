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
from asyncmoe.receiver import devices, handshake
from asyncmoe.receiver.devices import differences, version_words
from asyncmoe.receiver.meeting import Device, EngineRanks, Ready, Terms
from asyncmoe.reshard.nccl_transport import Origin, origin
from asyncmoe.trainer import direct_group

H100 = Device("host-a", "cuda:0", "NVIDIA H100 80GB HBM3 (sm_90)", "2.14.1+cu130", "2.30.7", "/venv/libnccl.so.2")
TERMS = Terms(
    {}, None, {}, (EngineRanks("engine.0", 2, 1, 3), EngineRanks("engine.1", 1, 1, 5)), "bfloat16", "bfloat16", "nccl", "s", True, 1, 1.0
)


def changed(ranks: tuple[int, ...], **changes: Any) -> dict[int, Device | None]:
    return {rank: msgspec.structs.replace(H100, **changes) if rank in ranks else H100 for rank in range(6)}


def test_equal_devices_and_cpus_are_taken() -> None:
    assert differences(changed(()), TERMS) == []
    assert differences(dict.fromkeys(range(6)), TERMS) == []
    assert devices.described(torch.device("cpu"), TERMS) is None


def test_two_versions_of_nccl_are_named_with_who_has_them_and_where() -> None:
    found = differences(changed((3, 4), host="host-b", nccl="2.29.7", library="/venv-engine/libnccl.so.2"), TERMS)
    assert found == [
        "NCCL: got 2.30.7 (trainer ranks 0-2 on host-a, /venv/libnccl.so.2; engine.1 rank 0 on host-a, /venv/libnccl.so.2) and "
        "2.29.7 (engine.0 ranks 0-1 on host-b, /venv-engine/libnccl.so.2), expected one; install the same torch and nvidia-nccl in both "
        "environments (make setup GPU=1), or set sync.transport=ipc on one machine"
    ]


def test_versions_do_not_matter_where_nccl_carries_nothing() -> None:
    assert differences(changed(tuple(range(6)), nccl="", library=""), TERMS) == []


@pytest.mark.parametrize(
    ("ranks", "changes", "said"),
    [
        ((1,), {"card": "NVIDIA A100 (sm_80)"}, r"the cards of the trainer: got .*H100.*ranks 0, 2.*and NVIDIA A100 \(sm_80\).*rank 1 on"),
        ((4,), {"card": "NVIDIA H200 (sm_90)"}, r"the cards of engine\.0: got .*rank 0 .*and NVIDIA H200 .*rank 1.*one kind of card"),
        (
            (2,),
            {"torch": "2.13.0", "host": "host-c"},
            r"torch of the trainer: got 2\.14\.1\+cu130 .*and 2\.13\.0 \(trainer rank 2 on",
        ),
    ],
)
def test_what_computes_together_is_of_one_kind(ranks: tuple[int, ...], changes: dict[str, str], said: str) -> None:
    (found,) = differences(changed(ranks, **changes), TERMS)
    assert re.match(said, found), found


def test_an_engine_of_other_cards_than_the_trainers_is_taken() -> None:
    assert differences(changed((5,), card="NVIDIA A100 (sm_80)"), TERMS) == []


def test_a_rank_says_what_the_library_it_opens_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(devices, "origin", lambda: Origin(23007, "/x/libnccl.so.2"))
    found = devices.described(torch.device("cuda:3"), TERMS)
    assert found is not None
    assert (found.device, found.card, found.nccl, found.library) == ("cuda:3", "NVIDIA H100 (sm_90)", "2.30.7", "/x/libnccl.so.2")

    def missing() -> Origin:
        raise UserError("NCCL (libnccl.so.2)", got="nothing", expected="NVIDIA's NCCL")

    monkeypatch.setattr(devices, "origin", missing)
    with pytest.raises(UserError, match="NCCL"):
        devices.described(torch.device("cuda:3"), TERMS)
    by_ipc = devices.described(torch.device("cuda:3"), msgspec.structs.replace(TERMS, transport="ipc"))
    assert by_ipc is not None
    assert by_ipc.nccl == ""


@pytest.mark.parametrize(("code", "words"), [(23007, "2.30.7"), (22907, "2.29.7"), (21403, "2.14.3"), (2804, "2.8.4")])
def test_versions_are_written_as_people_do(code: int, words: str) -> None:
    assert version_words(code) == words


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to build the stand-in with")
def test_libraries_of_two_versions_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From what the libraries themselves say to the line that rank 0 ends the meeting with."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(handshake, "differences", lambda *_: [])
    monkeypatch.setattr(direct_group.route, "engine_layouts", lambda _: [SimpleNamespace(rank=rank) for rank in range(3, 6)])
    ready = {}
    for rank in range(6):
        library = tmp_path / ("engine.so" if rank == 5 else "trainer.so")
        if not library.exists():
            built(library)
        monkeypatch.setenv("FAKE_NCCL_VERSION", "22907" if rank == 5 else "23007")
        monkeypatch.setattr(devices, "origin", lambda path=str(library): origin(path))
        ready[rank] = Ready(plan="same", device=devices.described(torch.device(f"cuda:{rank}"), TERMS))
    (said,) = direct_group._differences(TERMS, ready, {})
    assert said.startswith("NCCL: got 2.30.7 (trainer ranks 0-2 on ")
    assert f"and 2.29.7 (engine.1 rank 0 on {socket.gethostname()}, {tmp_path}/engine.so), expected one; install" in said
