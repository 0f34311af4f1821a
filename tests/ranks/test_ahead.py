"""Neither fetching ahead nor a stop changes anything of what is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncmoe.config.model import MadeModel
from asyncmoe.models.make import make_model
from tests.ranks import launch

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(("layout", "askers"), [("tp=1", 2), pytest.param("tp=2", 1, marks=pytest.mark.thorough)])
def test_a_run_is_the_same_to_the_bit_with_and_without_fetching_ahead(tmp_path: Path, layout: str, askers: int) -> None:
    make_model(tmp_path / "hf", MadeModel(), seed=0)
    found = launch.run("ahead", 2, tmp_path, str(tmp_path), layout)
    without, ahead = found[0][layout]
    assert without["fetches"] == [False] * 4 * askers
    # All but the first step's; one rank may fetch ahead before the other has fetched its first.
    assert sorted(ahead["fetches"]) == [False] * askers + [True] * 3 * askers
    for rank in found:
        without, ahead = rank[layout]
        assert ahead["steps"] == without["steps"]
        assert ahead["weights"] == without["weights"]
        assert len({str(step) for step in ahead["steps"]}) == 4
        whole, resumed = rank["dropout"]
        assert resumed == whole
    keys = [key for _, batch, _ in ahead["steps"] for key in batch]
    assert len({drawn for rank in found for _, _, drawn in rank[layout][1]["steps"]}) == 2 * 4  # no rank or step draws as another does
    assert sorted(keys) == sorted(f"g{group}.e{episode}" for group in range(12) for episode in range(2))
