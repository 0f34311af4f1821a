"""Checkpoints that are written while training goes on are bit for bit those of saves for which it stands still."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import launch, lora_oracle, oracle

pytestmark = pytest.mark.ranks

LAYOUTS = {
    1: ["tp=1,dtype=bfloat16,distributed=1"],
    2: ["tp=2,dtype=bfloat16", "lora=per-expert,ep=2,distributed=1"],
}
COMBINED = {
    2: [
        *("tp=1,dtype=bfloat16,distributed=1", "pp=2", "ep=2,distributed=1"),
        *("lora=shared-outer,tp=2", "lora=shared-outer,cp=2,distributed=1"),
    ],
    4: [
        *("tp=2,ep=2,distributed=1,dtype=bfloat16", "pp=2,ep=2,distributed=1", "tp=2,pp=2,vpp=2"),
        *("pp=2,vpp=2,distributed=1", "tp=2,ep=2,etp=2,distributed=1"),
    ],
}
"""Of parts that the others have too."""


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory, thorough: bool) -> Path:
    path = tmp_path_factory.mktemp("async")
    oracle.write(path / "plain", "plain", trained=False)
    for name in ("per-expert", "shared-outer") if thorough else ("per-expert",):
        lora_oracle.write(path / "plain", name)
    return path


@pytest.fixture(scope="module")
def found(references: Path, thorough: bool) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    for ranks in (1, 2, 4) if thorough else LAYOUTS:
        wanted = [*LAYOUTS.get(ranks, ()), *(COMBINED.get(ranks, ()) if thorough else ())]
        made = launch.run("async_save", ranks, references, str(references), *wanted)
        results |= {f"{ranks}: {layout}": one for layout, one in made.items()}
    return results


@pytest.mark.parametrize(
    "layout",
    [f"{ranks}: {layout}" for ranks, layouts in LAYOUTS.items() for layout in layouts]
    + [pytest.param(f"{ranks}: {layout}", marks=pytest.mark.thorough) for ranks, layouts in COMBINED.items() for layout in layouts],
)
def test_it_is_the_checkpoint_of_its_step_whatever_training_does_meanwhile(found: dict[str, dict[str, Any]], layout: str) -> None:
    assert found[layout]["differ"] == []
    assert found[layout]["planned_once"], "later saves only copy"
    assert 0.99 < found[layout]["copied_over_planned"] < 1.01, "a sharded state is padded"
    assert found[layout]["names"], "the others were deleted"
