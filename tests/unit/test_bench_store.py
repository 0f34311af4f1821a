"""The measurement itself, on a small model: the numbers are there and consistent."""

from __future__ import annotations

from benchmarks import store

SMALL = {**store.MODEL, "num_hidden_layers": 1, "num_experts": 4, "vocab_size": 1024, "hidden_size": 256}


def test_results_have_what_they_promise() -> None:
    results = store.run(SMALL)
    whole = results["whole"]
    assert whole["read"] >= whole["written"] * 0.9 > 0, "two ranks read what they hold; some of it both"
    assert [one["percent"] for one in results["percents"]] == [0.3, 1.0, 3.0]
    for one, most in zip(results["percents"], (0.02, 0.04, 0.08), strict=True):
        assert 0 < one["share_written"] < most
        assert 0 < one["share_read"] < most
    assert 1 < results["late"]["share_read"] < 1.3
    assert store.table(results).count("%") >= 9
