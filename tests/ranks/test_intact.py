"""Real checkpoints of two ranks that something has damaged."""

from __future__ import annotations

from typing import Any

import pytest

from asyncmoe.config.model import MadeModel
from asyncmoe.models.make import make_model
from tests.ranks.launch import run

pytestmark = pytest.mark.ranks
OLDER, NEWER = "step-00000001", "step-00000002"
DAMAGES = ("flipped", "cut", "missing", "metadata", "common", "facts")
"""As intact.py makes them."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("intact")
    make_model(path / "model", MadeModel(), seed=0)
    return run("intact", 2, path, str(path / "model"))


def test_every_file_is_in_the_manifest(found: Any) -> None:
    assert found["sealed"] == [name for name in found["present"] if name != "manifest.json"]
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "common.pt", "asyncmoe.json"} <= set(found["sealed"])


def test_an_intact_checkpoint_is_taken(found: Any) -> None:
    assert found["none"] == [[2, [2.0], [OLDER, NEWER]]] * 2


@pytest.mark.parametrize("damage", DAMAGES)
def test_both_ranks_go_on_from_the_checkpoint_before(damage: str, found: Any) -> None:
    assert found[damage] == [[1, [1.0], [OLDER, f"{NEWER}.damaged"]]] * 2


def test_both_ranks_refuse_if_none_is_left_and_rename_nothing(found: Any) -> None:
    first, second = found["both"]
    assert first == second
    assert f"{NEWER} is damaged: __0_0.distcp has other content" in first[0]
    assert f"{OLDER} is damaged: __0_0.distcp has other content" in first[0]
    assert first[1] == [OLDER, NEWER]
