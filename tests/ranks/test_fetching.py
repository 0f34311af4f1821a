"""The controller sends a batch once to each tensor-parallel group."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncmoe.config.model import MadeModel
from asyncmoe.models.make import make_model
from asyncmoe.trajectory import frames_in
from tests.ranks import launch

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("layout", [pytest.param("tp=2", marks=pytest.mark.thorough), "tp=2,ranks=4"])
def test_one_rank_of_a_group_asks_and_all_have_the_same(tmp_path: Path, layout: str) -> None:
    make_model(tmp_path / "hf", MadeModel(), seed=0)
    sizes, ranks = layout.partition(",")[0], 4 if "ranks" in layout else 2
    found = launch.run("fetching", ranks, tmp_path, str(tmp_path), sizes)
    assert len(found) == ranks
    for rank in found:
        assert rank["same"]
        assert rank["counts"] == [2, 0, 1, 4]
        mine = [[f"g{rank['dp_rank']}", "g3"], ["g1"], ["g0", "g1", "g2", "g3"], ["g1"], ["g1"]]
        assert rank["asked"] == (mine if rank["tp_rank"] == 0 else [])
        first, other = rank["tp_rank"] == 0, f"ProtocolError: rank {2 * rank['dp_rank']} could not fetch the batch: "
        gone, short = rank["refused"]
        assert gone.startswith("WaitTimeout: " if first else other)
        assert "rollout worker 1" in gone
        assert short == ("ProtocolError: " if first else other) + f"got a batch of 0 frames, expected {frames_in(1)}"
