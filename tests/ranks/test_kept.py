"""Recorded experts and ids under every layout: log-probabilities, gradients and counts are those of Hugging Face's model forced to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import kept_oracle, launch

pytestmark = pytest.mark.ranks

RANKS = {
    **dict.fromkeys(("tp=1", "tp=1,recompute=full"), 1),
    **dict.fromkeys(("tp=2", "pp=2", "pp=2,recompute=full", "pp=2,vpp=2", "cp=2,recompute=full"), 2),
    **dict.fromkeys(("tp=2,recompute=full", "pp=2,vpp=2,recompute=full", "ep=2,recompute=selective"), 2),
    **dict.fromkeys(("tp=2,ep=2", "pp=2,ep=2,recompute=full", "pp=2,ep=2", "cp=4", "cp=2,pp=2", "tp=2,cp=2,ep=2"), 4),
    **dict.fromkeys(("tp=2,pp=2,recompute=full", "tp=2,pp=2,vpp=2"), 4),
}
BOTH = ("packed", "single")
"""single: each trajectory in a micro-batch of its own."""
FEW = {
    ("tp=1",): BOTH,
    ("pp=2,vpp=2,recompute=full",): BOTH,
    **{(layout,): ("packed",) for layout in ("tp=2,recompute=full", "ep=2,recompute=selective", "tp=2,cp=2,ep=2")},
}
EVERY = {(layout,): BOTH for layout in RANKS}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kept")
    kept_oracle.write(path, "plain")
    return path


@pytest.fixture(scope="module")
def found(references: Path, thorough: bool) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    for ranks in (1, 2, 4):
        tried = [f"{layout}:{'+'.join(ways)}" for (layout,), ways in (EVERY if thorough else FEW).items() if RANKS[layout] == ranks]
        results |= launch.run("kept", ranks, references, str(references), *tried)
    return results


def test_most_layers_would_choose_other_experts_for_many_tokens(references: Path) -> None:
    differ = torch.load(references / "kept.pt", weights_only=False)["differ"]
    assert min(differ) > 0.1
    assert max(differ) < 1.0


@pytest.mark.parametrize(("layout", "how"), launch.marked(EVERY, FEW))
def test_what_was_sampled_is_what_is_trained(found: dict[str, dict[str, Any]], layout: str, how: str) -> None:
    check(found[layout][how])
    assert found[layout][how]["microbatches"] >= (4 if "pp=2" in layout and "ep" not in layout else 1)


def check(errors: dict[str, Any]) -> None:
    assert errors["logprobs"] < 1e-4
    assert errors["loss"] < 1e-5
    assert errors["gradients"] < 1e-4
    assert errors["routers"] > 0
    assert errors["differ"] < 1e-9
    assert errors["sampled_logprobs"] < 1e-4
    assert errors["sampled_mismatch"] == errors["sampled_digests"] == 0
    assert errors["biases"] < 1e-6
    assert errors["unkept_logprobs"] > 0.01  # the same forward pass with the router's own choice


@pytest.mark.parametrize(
    ("variant", "ranks", "layout"),
    [
        ("deepseek", 1, "tp=1,recompute=full"),
        pytest.param("glm", 1, "tp=1,recompute=full", marks=pytest.mark.thorough),
        pytest.param("moonlight", 2, "tp=2", marks=pytest.mark.thorough),
        pytest.param("mixtral", 2, "ep=2", marks=pytest.mark.thorough),
        pytest.param("deepseek", 4, "pp=2,ep=2,recompute=full", marks=pytest.mark.thorough),
    ],
)
def test_routers_with_biases_and_groups_and_layers_without_experts(
    tmp_path: Path, thorough: bool, variant: str, ranks: int, layout: str
) -> None:
    kept_oracle.write(tmp_path, variant)
    ways = "packed+single" if thorough else "packed"
    for errors in launch.run("kept", ranks, tmp_path, str(tmp_path), f"{layout}:{ways}")[layout].values():
        check(errors)
