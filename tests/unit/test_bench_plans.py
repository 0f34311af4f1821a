"""`asyncmoe bench plan`: what it counts, and that its sizes are ones the models can have."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from typer.main import get_command

from asyncmoe.cli import bench
from asyncmoe.errors import UserError
from asyncmoe.models import family_of
from asyncmoe.plan.sizes import parse_engines, parse_trainer
from benchmarks import plans
from benchmarks.published import REAL


@pytest.mark.parametrize("name", plans.SIZES)
def test_sizes_are_ones_that_the_model_can_have(name: str) -> None:
    trainer, (count, engine) = parse_trainer(plans.SIZES[name][0]), parse_engines(plans.SIZES[name][1])
    assert (trainer.world, count * engine.world) == (256, 128)
    family_of(REAL[name]).check({**REAL[name], "num_nextn_predict_layers": 0}, trainer, engine)


def test_an_engine_rank_receives_what_it_holds_and_a_trainer_rank_sends_its_share() -> None:
    """Mixtral 8x22B, engines of tp 8 ep 8: one expert a layer each, an eighth of everything else but routers and norms."""
    got = plans._planned("Mixtral-8x22B", False, 256)
    hidden, inner, layers, vocabulary = 6144, 16384, 56, 32000
    attention = (48 + 2 * 8 + 48) * 128 * hidden // 8
    whole = 8 * hidden + 2 * hidden
    held = layers * (3 * hidden * inner + attention + whole) + 2 * vocabulary // 8 * hidden + hidden
    assert got["bytes"] == 2 * held
    assert got["plan_seconds"] > 0
    sent = plans._planned("Mixtral-8x22B", False, 0)
    assert math.isclose(sent["bytes"], 16 * 8 * got["bytes"] / 256, rel_tol=0.2)


def test_an_installed_package_says_where_benchmarks_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "asyncmoe" / "cli" / "bench.py"))
    with pytest.raises(UserError, match=r"benchmarks: got an installed package, expected a checkout.*clone"):
        get_command(bench.commands()).main(args=[], standalone_mode=False)
