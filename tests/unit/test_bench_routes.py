"""The routes bench: what it measures is right, whatever its speed."""

from __future__ import annotations

import numpy as np

from benchmarks import recording, routes


def test_its_routes_are_distinct_experts() -> None:
    drawn = routes.drawn(20)
    assert (drawn.shape, drawn.dtype) == ((20, 48, 8), np.int32)
    assert (np.diff(np.sort(drawn, axis=2), axis=2) > 0).all()


def test_bytes_per_token() -> None:
    results = routes.run(tokens=100, rounds=1)
    assert results["packed"]["bytes_per_token"] <= 336
    assert results["json"]["bytes_per_token"] > 4 / 3 * 1536 * 100 / 101
    results["replay"] = {"share": 0.0123, "step_seconds": 0.25}
    results["recording"] = {"share": 0.0345, "share_quartiles": [-0.01, 0.0567], "tokens_per_s": 987.0, "processor_share": 0.021}
    results["answer"] = {"read": 1.25, "read_plain": 0.75, "read_unpacked": 2.5, "decode": 4.5, "decode_unpacked": 6.0, "pack": 0.625}
    said = routes.table(results)
    for figure in (
        f"{results['packed']['bytes_per_token']:.1f}",
        "1.2%",
        "250 ms",
        "3.5%",
        "987 tokens/s",
        "5.7%",
        "+2.1%",
        "1.25",
        "0.62",
    ):
        assert figure in said


def test_an_answer_is_taken_apart_the_way_the_controller_does() -> None:
    spent = recording.answer(routes.drawn(50), routes.ROUTING, rounds=1)
    assert set(spent) == {"pack", "read", "read_unpacked", "read_plain", "decode", "decode_unpacked"}
    assert min(spent.values()) > 0
