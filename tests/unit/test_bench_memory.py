"""The bench of memory: what it measures is right, and what is planned for is what tensors take, at a small size."""

from __future__ import annotations

import pytest

from benchmarks import step_memory
from benchmarks.step_memory import PARTS, StepMemory


def test_the_rank_that_has_most_counts() -> None:
    planned = dict.fromkeys(PARTS, 20)
    less, more = (StepMemory({**planned, "working set": size}, planned, 300 - size, 50, 1.0) for size in (0, 40))
    found = step_memory.figures([less, more], 10)
    assert found.pop("parts")["working_set"] == {"live": 40, "planned": 20}
    assert found == {"live": 120, "planned": 100, "over": 1.2, "resident": 300, "largest": 50, "scores": 400, "s": 1.0}


@pytest.mark.parametrize(("model", "kind", "cp"), [("dense", "one", 2), pytest.param("moe", "packed", 1, marks=pytest.mark.thorough)])
def test_tensors_take_what_is_planned_for(model: str, kind: str, cp: int) -> None:
    """Within a tenth; and no tensor has a number for each pair of tokens. By default the dense one: of a mixture tests/ranks/test_memory.py
    compares both."""
    results = step_memory.run(4096, [(model, kind)], [cp])
    found = results["cases"][f"{model}_{kind}_cp{cp}"]
    assert found["over"] == pytest.approx(1.0, abs=0.1), step_memory.table(results)
    for name in ("weights", "gradients", "optimizer"):
        assert found["parts"][name]["live"] == found["parts"][name]["planned"]
    kept = found["parts"]["activations"]
    assert kept["live"] == pytest.approx(kept["planned"], rel=0.03)
    assert found["resident"] > 0.5 * found["live"]
    if kind == "one":
        assert found["largest"] < found["scores"] / 2
