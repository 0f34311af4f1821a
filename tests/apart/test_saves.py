"""Saves of one rank: what is written is what was there when it began, and a disk that hangs is not waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asyncmoe import checkpoints
from asyncmoe.checkpoints import intact
from asyncmoe.errors import AsyncmoeError
from asyncmoe.platform.megatron.writer import Planned
from asyncmoe.trainer.model import checkpoint, mesh, optimizer
from asyncmoe.trainer.model.checkpoint_saver import Saver
from tests.saving import built, small


class Rank:
    """A rank with a small model, whose parameters are all set to a number."""

    def __init__(self, path: Path) -> None:
        self.run = path / "run"
        self.config = small(path, async_save=True, timeout_s=1, optimizer={"distributed": True}, keep_checkpoints=9)
        self.built = built(self.config)
        self.adam = optimizer.build(self.config, self.built)
        self.saver = Saver(self.config, self.built, self.adam)

    @torch.no_grad()
    def fill(self, value: float) -> None:
        for parameter in self.built.weights().values():
            parameter.fill_(value)

    def loaded(self, step: int) -> set[float]:
        assert checkpoint.load(checkpoints.directory(self.run, step), self.config, self.built, self.adam) == step
        return {float(value) for parameter in self.built.weights().values() for value in parameter.unique()}


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    (tmp_path / "run").mkdir()
    yield Rank(tmp_path)
    mesh.stop()


def test_a_checkpoint_is_of_its_step_and_becomes_one_when_it_is_written(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    go, write = threading.Event(), Planned.write

    def waiting(planned: Planned) -> None:
        go.wait(10)
        write(planned)

    monkeypatch.setattr(Planned, "write", waiting)
    for step in (1, 2, 3, 4):
        go.clear()
        rank.fill(step)
        rank.saver.save(step)
        rank.fill(-1.0)
        assert rank.saver.saved() == []
        assert checkpoints.newest(rank.run) == (checkpoints.directory(rank.run, step - 1) if step > 1 else None)
        go.set()
        rank.saver.settle()
        assert [saved for saved, _ in rank.saver.saved()] == [step]
    assert [rank.loaded(step) for step in (1, 2, 3, 4)] == [{1.0}, {2.0}, {3.0}, {4.0}]
    assert intact.fault(checkpoints.directory(rank.run, 4)) is None


def test_a_disk_that_hangs_ends_the_wait(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planned, "write", lambda planned: threading.Event().wait())
    rank.saver.save(1)
    with pytest.raises(AsyncmoeError, match="checkpoint of step 1: nothing was written for 1 s; does its disk hang"):
        rank.saver.settle()
