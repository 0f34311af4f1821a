"""Asynchronous checkpoints are bit for bit equal to synchronous ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import launch, lora_oracle, oracle

pytestmark = pytest.mark.ranks

FEW = {"1": ["tp=1,dtype=bfloat16,distributed=1"], "2": ["tp=2,dtype=bfloat16", "lora=per-expert,ep=2,distributed=1"]}
COMBINED = {
    "2": ["pp=2", "ep=2,distributed=1", "lora=shared-outer,tp=2", "lora=shared-outer,cp=2,distributed=1"],
    "4": ["tp=2,ep=2,distributed=1,dtype=bfloat16", "pp=2,vpp=2,distributed=1", "tp=2,ep=2,etp=2,distributed=1"],
}
EVERY = {ranks: [*FEW.get(ranks, ()), *COMBINED.get(ranks, ())] for ranks in ("1", "2", "4")}
"""Layouts by ranks."""


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory, thorough: bool) -> Path:
    path = tmp_path_factory.mktemp("async")
    oracle.write(path / "plain", "plain", trained=False)
    for name in ("per-expert", "shared-outer") if thorough else ("per-expert",):
        lora_oracle.write(path / "plain", name)
    return path


@pytest.fixture(scope="module")
def found(references: Path, thorough: bool) -> dict[str, dict[str, Any]]:
    wanted = (EVERY if thorough else FEW).items()
    return {ranks: launch.run("async_save", int(ranks), references, str(references), *layouts) for ranks, layouts in wanted}


@pytest.mark.parametrize(("ranks", "layout"), launch.marked({(one,): EVERY[one] for one in EVERY}, {(one,): FEW[one] for one in FEW}))
def test_it_is_the_checkpoint_of_its_step_whatever_training_does_meanwhile(found: dict[str, Any], ranks: str, layout: str) -> None:
    saved = found[ranks][layout]
    assert saved["differ"] == []
    assert saved["planned_once"], "later saves only copy"
    assert 0.99 < saved["copied_over_planned"] < 1.01, "a sharded state is padded"
    assert saved["names"], "the others were deleted"
