"""Updates that are deltas between GPUs: the real senders and receivers over CUDA IPC, on the stand-in of a machine with GPUs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from delta_meeting import Rig, fine, meetings
from device_standin import Machine, OnDevice1, machine

from asyncmoe.reshard import ipc_transport
from asyncmoe.reshard.delta_work import GpuWork

__all__ = ["machine"]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the stand-in with")


@pytest.fixture
def rig(machine: Machine, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    # Receivers of this rig hold on to their memory until senders have gone.
    monkeypatch.setattr(ipc_transport, "_CLOSING_S", 0.2)
    monkeypatch.setattr(ipc_transport, "_kept", [])
    machine.call("swap", 1)  # as SGLang's worker has its main thread
    with meetings() as meet:
        yield meet(transport="ipc", there=OnDevice1, **getattr(request, "param", {"delta": False}))


@pytest.mark.parametrize("rig", [{"in_place": False}, {"in_place": True}], ids=["staged", "in place"], indirect=True)
def test_versions_in_a_row_are_what_the_trainer_has(rig: Rig) -> None:
    """In place, as on a GPU without room for a second copy, full updates only are written so."""
    for version, share in ((1, 0.0), (2, 0.01), (3, 0.0), (4, 0.1), (5, 1.0), (6, 0.01)):
        rig.change(share, version)
        found = rig.send(version)
        assert fine(found), found
        assert rig.wrong == []
    assert rig.kinds() == ["full", "delta of 1", "delta of 2", "delta of 3", "full", "delta of 5"]
    in_place = rig.terms.in_place
    assert rig.staged_in_place() == [in_place, False, False, False, in_place, False]
    assert all(isinstance(receiver._decoder and receiver._decoder._work, GpuWork) for receiver in rig.receivers)
