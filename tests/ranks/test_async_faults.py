"""Checkpoints that cannot be written, or are damaged later."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.config.model import MadeModel
from asyncmoe.models.make import make_model
from tests.ranks import launch

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path: Path = tmp_path_factory.mktemp("faults")
    make_model(path / "model", MadeModel(), seed=0)
    made: dict[str, Any] = launch.run("async_faults", 2, path, str(path / "model"))
    return made


@pytest.mark.parametrize("step", ["2", "3"])
def test_every_rank_raises_the_reason_of_the_one_that_could_not_write(found: dict[str, Any], step: str) -> None:
    first, second = found["failures"][step]
    assert first == second
    assert first.startswith(f"StorageError: checkpoint of step {step}: cannot write ")
    assert f"step-{int(step):08d}.writing on {socket.gethostname()}: File too large (EFBIG), " in first
    assert first.endswith("the run resumes from step-00000001")


def test_a_fault_that_is_not_storages_is_told_with_its_rank(found: dict[str, Any]) -> None:
    assert found["failures"]["bug"] == ["AsyncmoeError: checkpoint of step 4: trainer rank 1: ValueError: a bug"] * 2


def test_the_checkpoint_before_stays_whole_and_later_saves_go_on(found: dict[str, Any]) -> None:
    assert found["kept"] == ["step-00000001"]
    assert found["loaded"] == 1
    assert found["saved"] == ["step-00000005", "step-00000006"]


def test_both_ranks_go_on_from_the_checkpoint_before_a_damaged_one(found: dict[str, Any]) -> None:
    assert found["resumed"] == [[5, [5.0], ["step-00000005", "step-00000006.damaged"]]] * 2
    first, second = found["refused"]
    assert first == second
    assert "step-00000005 is damaged: __0_0.distcp has other content" in first


def test_a_save_waits_for_the_one_before_and_both_are_told(found: dict[str, Any]) -> None:
    assert found["told"] == [1, 5, 6]
    assert found["waited"]
