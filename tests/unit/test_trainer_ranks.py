"""What trainer ranks ask of the controller about engines, and how they leave a weight group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed
from torch.distributed import distributed_c10d

from asyncmoe.rpc.messages import EngineInfo, Engines
from asyncmoe.weights.sender.broadcast_group import leave
from asyncmoe.weights.sender.rendezvous import TrainerRanks
from tests.configs import minimal


@pytest.mark.parametrize(("waiting", "starving"), [((), False), ((True, True), True), ((True, False), False), ((False,), False)])
def test_a_version_is_needed_again_where_all_engines_wait_for_one(waiting: tuple[bool, ...], starving: bool) -> None:
    engines = tuple(EngineInfo(f"engine.{at}", 1, 1, 1 + at, 0, waiting=waits) for at, waits in enumerate(waiting))
    client: Any = SimpleNamespace(ask=lambda *_: (Engines(engines, 1 + len(engines), 1), ()))
    mesh: Any = SimpleNamespace(mesh=None)
    assert TrainerRanks(minimal(), mesh, client, None).starving() is starving


@pytest.mark.parametrize(("backend", "freed"), [("nccl", "_abort_process_group"), ("gloo", "destroy_process_group")])
def test_a_group_of_nccl_is_left_without_waiting_for_its_messages(monkeypatch: pytest.MonkeyPatch, backend: str, freed: str) -> None:
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(distributed_c10d, "_abort_process_group", lambda group: calls.append(("_abort_process_group", group)))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group: calls.append(("destroy_process_group", group)))
    group: Any = object()
    leave(group, backend)
    assert calls == [(freed, group)]
