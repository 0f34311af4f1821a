"""Users' own losses and importance weights on Megatron's ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncmoe.config.model import MadeModel
from asyncmoe.models.make import make_model
from tests.ranks import launch

pytestmark = pytest.mark.ranks
LAYOUTS = ("pp=2", "ep=2")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Both ranks' results, by layout."""
    path: Path = tmp_path_factory.mktemp("plugin")
    make_model(path / "hf", MadeModel(), seed=0)
    return launch.run("plugin", 2, path, str(path), *LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_are_the_same_on_every_rank(found: Any, layout: str) -> None:
    first, second = (rank[layout]["metrics"] for rank in found)
    assert first == second
    metrics, ratio = first
    assert metrics == {"loss/ratio": pytest.approx(ratio, rel=1e-5), "loss/sampled": 1.0}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_refuses_a_wrong_value_before_any_parameter_changes_and_a_stale_copy(found: Any, layout: str) -> None:
    (wrong, stale), second = ((rank[layout]["wrong"], rank[layout]["stale"]) for rank in found)
    assert second == (wrong, stale)
    line, unchanged = wrong
    assert line.startswith("objective.loss: got 1 wrong values from tests.unit.plugin_functions:breaks_later (")
    assert unchanged
    assert stale.startswith("objective: got another file of own_loss:loss on rank 1 than on rank 0")
