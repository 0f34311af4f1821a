"""Weights sent between hosts, which are network namespaces."""

from __future__ import annotations

import pytest

from benchmarks.network import run
from benchmarks.network.cases import Case, sized
from benchmarks.network.hosts import Wire, missing
from benchmarks.network.rank import DIRECT

pytestmark = [pytest.mark.system, pytest.mark.thorough, pytest.mark.skipif(bool(why := missing()), reason=why)]
WIRE = Wire(rate=100_000_000)
SMALL = {**sized(55, 2), "hidden_size": 256, "vocab_size": 1024, "num_experts": 4, "num_experts_per_tok": 2}


def test_weights_and_deltas_travel_as_planned() -> None:
    """In `measured` every host's counters are compared with the plan, and every destination with what it should hold; also every pair of a
    full update and a delta, and in the end each engine host's weights with what the same changes of the first version make."""
    case = Case(SMALL, trainers=2, engines=2, tp=1)
    found = run.measured(case, WIRE, (DIRECT, "per_tensor"), rounds=1, bucket_bytes=1 << 18, changed=(1.0, 10.0))
    direct, others = (found["ways"][way] for way in (DIRECT, "per_tensor"))
    assert direct["planned_bytes"] == 2 * found["bytes"]
    assert others["trainer_copies"] >= 1
    assert 1 <= direct["over_plan"] < 1.2
    few, many = found["deltas"]["percents"]
    for one, percent in ((few, 1.0), (many, 10.0)):
        assert one["percent"] == percent
        assert one["changed"] == pytest.approx(percent / 100, rel=0.02)
        assert one["dense"]["planned_bytes"] == direct["planned_bytes"]
        assert one["delta"]["planned_bytes"] < one["dense"]["planned_bytes"] * percent / 100 * 1.8
    assert few["ratio"]["bytes"] > 3 * many["ratio"]["bytes"] > 9
    assert found["deltas"]["full"]["peak_extra_share"] > 0.95, "a second copy"
    assert found["deltas"]["full"]["trainer_extra_share"] > 0.95, "what was published last"
    assert DIRECT in run.table({"skipped": "", "cases": [found]})
