"""Updates that are deltas between GPUs: the real senders and receivers over CUDA IPC, on the stand-in of a machine with GPUs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_meeting import Rig, meetings
from device_standin import Machine, OnDevice1, build

import asyncmoe.reshard.delta_work as delta_work
from asyncmoe.receiver import protocol, worker
from asyncmoe.reshard import ipc_transport

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the stand-in with")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def rig(library: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    # Receivers of this rig hold on to their memory until senders have gone.
    monkeypatch.setattr(ipc_transport, "_CLOSING_S", 0.2)
    monkeypatch.setattr(ipc_transport, "_kept", [])
    machine = Machine(library)
    machine.install(monkeypatch)
    machine.call("swap", 1)
    with meetings() as meet:
        yield meet(transport="ipc", there=OnDevice1, **getattr(request, "param", {}))


@pytest.mark.parametrize("rig", [{}], indirect=True)
def test_a_card_counts_what_deltas_take(rig: Rig) -> None:
    """CUDA IPC has no buffers at the receiver; coded bytes take the place of a second copy."""
    for rank, model in rig.workers.items():
        card = rig.senders[0].met.store.get(protocol.ready(rank), 1.0).card
        assert card is not None
        assert (card.wanted, card.copy) == (0, sum(one.nbytes for one in model.parameters()))


def each(in_place: bool) -> Any:
    return pytest.param({"in_place": in_place}, id="in place" if in_place else "staged")


@pytest.mark.parametrize("rig", [each(False), each(True)], indirect=True)
def test_versions_in_a_row_are_what_the_trainer_has(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, as on a GPU without room for a second copy, full updates only are written so."""
    waited: list[Any] = []
    wait_idle = worker.wait_idle
    monkeypatch.setattr(worker, "wait_idle", lambda device, seconds: waited.append(device) or wait_idle(device, seconds))
    coded: list[bool] = []
    run = delta_work.GpuWork.apply

    def apply(self: Any, *args: Any, write: bool) -> int:
        coded.append(write)
        return run(self, *args, write=write)

    monkeypatch.setattr(delta_work.GpuWork, "apply", apply)
    for version, share in ((1, 0.0), (2, 0.01), (3, 0.0), (4, 0.1), (5, 1.0), (6, 0.01)):
        rig.change(share, version)
        found = rig.send(version)
        assert all(isinstance(one, float) for one in found), found
        assert rig.wrong == []
    assert rig.kinds() == ["full", "delta of 1", "delta of 2", "delta of 3", "full", "delta of 5"]
    in_place = rig.terms.in_place
    assert rig.staged_in_place() == [in_place, False, False, False, in_place, False]
    assert {True, False} == set(coded)
    assert {str(device) for device in waited} == {"cuda:1"}


def test_a_weight_that_somebody_else_wrote_makes_the_update_full(rig: Rig) -> None:
    for version in (1, 2):
        rig.change(0.01, version)
        assert all(isinstance(one, float) for one in rig.send(version))
    name = next(iter(dict(rig.workers[2].named_parameters())))
    with torch.no_grad():
        rig.workers[2].get_parameter(name).view(torch.int16).reshape(-1)[:] ^= 1
    rig.change(0.01, 3)
    assert any(isinstance(one, Exception) for one in rig.send(3))
    assert rig.senders[0].doubted
    assert all(isinstance(one, float) for one in rig.send(3))
    assert rig.wrong == []
