"""The measurement itself, on a small model: deltas bring what a dense update brings, and the numbers are there and consistent."""

from __future__ import annotations

import pytest

from benchmarks import delta

SMALL = {**delta.MODEL, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 1024, "hidden_size": 256}


def test_results_have_what_they_promise() -> None:
    results = delta.run(SMALL, 1)
    assert min(results[name] for name in ("memcpy", "digest", "full", "dense_bytes")) > 0
    assert [one["percent"] for one in results["percents"]] == [0.3, 1.0, 3.0]
    for one in results["percents"]:
        assert one["changed"] == pytest.approx(one["percent"] / 100 * results["dense_bytes"] / 2, rel=0.05)
        assert one["nbytes"] == pytest.approx(one["changed"] * one["bytes_per_change"])
        assert min(one[name] for name in ("encode", "encode_share", "take", "prove", "commit")) > 0
    assert [one["bytes_per_change"] <= most for one, most in zip(results["percents"], (3.8, 3.3, 3.1), strict=True)] == [True] * 3
    assert delta.table(results).count("%") >= 9
