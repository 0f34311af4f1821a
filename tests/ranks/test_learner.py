"""A leased batch is fetched (once for the ranks that share a part), scored, guarded and trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncmoe.config.model import MadeModel
from asyncmoe.models.make import make_model
from tests.ranks import launch

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("layout", ["tp=2", pytest.param("ep=2", marks=pytest.mark.thorough)])
def test_a_batch_is_trained_left_out_or_ends_the_run(tmp_path: Path, layout: str) -> None:
    make_model(tmp_path / "hf", MadeModel(), seed=0)
    every = launch.run("learner", 4, tmp_path, str(tmp_path), layout)
    first = every[0][0]
    for rank, (found, tp_rank, asked, gone) in enumerate(every):
        assert found == first
        assert asked == (tp_rank == 0)
        mine = "WaitTimeout: " if asked else f"ProtocolError: rank {rank - tp_rank} could not fetch the batch: "
        assert gone.startswith(mine)
        assert "rollout worker 1" in gone
    updates, broken, untrained, changed = first["healthy"]
    assert [one[:2] for one in updates] == [[True, False]] * 2
    assert updates[0][2] == pytest.approx(0.0, abs=1e-6)  # the reference is where training starts
    assert updates[0][3] == 0.0  # and the first update is its own proximal policy
    assert updates[1][2] > 0
    assert (broken, untrained, changed) == ([], "", True)
    skipped, ended = first["far"]
    assert [one[:2] for one in skipped[0]] == [[False, True]] * 2
    assert skipped[1:] == [["kl_engine"], "kl_engine", False]
    assert ended[0].startswith("AnomalyFound: ")
    assert "kl_engine is" in ended[0]
    assert ended[0].endswith("(verify) after 1 skipped batches; no parameter was changed")
    assert first["replayed"][1:] == [[], "", True]
    assert "max_logprob_diff is" in first["apart"][0]
