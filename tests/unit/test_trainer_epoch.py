"""The epoch of a trainer: how its ranks learn it, and that all their requests carry it."""

from __future__ import annotations

from typing import get_args

import pytest

from asyncmoe.rpc import messages
from asyncmoe.rpc.environment import TRAINER_EPOCH, trainer_epoch
from asyncmoe.rpc.messages import EngineRequest, EngineStarts, TrainerMessage
from asyncmoe.rpc.worker_messages import WorkerJoin, WorkerRequest


def test_the_launcher_says_it_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, epoch in (("", 0), ("3", 3)):
        monkeypatch.setenv(TRAINER_EPOCH, said)
        assert trainer_epoch() == epoch


def test_every_request_is_the_trainers_or_an_engines_or_for_a_worker() -> None:
    others = {*get_args(EngineRequest), EngineStarts, WorkerJoin, *get_args(WorkerRequest)}
    assert {one for one in get_args(messages.Request) if not issubclass(one, TrainerMessage)} == others
