"""What later features add costs nothing where it is not asked for: figures of plants from before there were any."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.simulate.plant import Plant
from asyncmoe.simulate.simulation import simulate
from asyncmoe.simulate.workload import parse

BEFORE: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "simulated.json").read_text())


@pytest.mark.parametrize("case", BEFORE, ids=lambda case: f"{case['workload']}-{case['mode']}")
def test_plants_from_before_have_the_figures_from_before(case: dict[str, Any]) -> None:
    found = asdict(simulate(Plant().having(case["plant"]), parse(case["workload"]), case["mode"]))
    counts = ("oldest_age", "ledger")
    assert {key: found[key] for key in counts} == {key: case["found"][key] for key in counts}
    figures = [key for key in case["found"] if key not in (*counts, "dropped")]
    assert {key: found[key] for key in figures} == pytest.approx({key: case["found"][key] for key in figures}, rel=1e-9, abs=1e-9)
