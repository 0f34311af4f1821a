"""The bench of memory: what it measures is right, and what is planned for is what tensors take, at a small size."""

from __future__ import annotations

import pytest

from benchmarks import step_memory
from benchmarks.step_memory import PARTS, StepMemory


def test_the_rank_that_has_most_counts() -> None:
    planned = dict.fromkeys(PARTS, 2_000_000)
    less, more = (StepMemory({**planned, "working set": size}, planned, 30_000_000 - size, 5_000_000, 1.0) for size in (0, 4_000_000))
    found = step_memory.figures([less, more], 1000)
    assert (found["live_MB"], found["planned_MB"], found["over"]) == (12.0, 10.0, 1.2)
    assert (found["resident_MB"], found["largest_MB"], found["scores_MB"]) == (30.0, 5.0, 4.0)
    assert found["parts"]["working set"] == {"live_MB": 4.0, "planned_MB": 2.0}


@pytest.mark.parametrize(("model", "kind", "cp"), [("dense", "one", 2), ("moe", "packed", 1)])
def test_tensors_take_what_is_planned_for(model: str, kind: str, cp: int) -> None:
    """Within a tenth; and no tensor has a number for each pair of tokens."""
    results = step_memory.run(4096, [(model, kind)], [cp])
    found = results["cases"][f"{model}_{kind}_cp{cp}"]
    assert found["over"] == pytest.approx(1.0, abs=0.1), step_memory.table(results)
    for name in ("weights", "gradients", "optimizer"):
        assert found["parts"][name]["live_MB"] == found["parts"][name]["planned_MB"]
    assert found["parts"]["activations"]["live_MB"] == pytest.approx(found["parts"]["activations"]["planned_MB"], rel=0.03)
    assert found["resident_MB"] > 0.5 * found["live_MB"]
    if kind == "one":
        assert found["largest_MB"] < found["scores_MB"] / 4
