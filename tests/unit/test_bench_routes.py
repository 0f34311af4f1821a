"""The routes bench: what it measures is right, whatever its speed."""

from __future__ import annotations

import numpy as np

from asyncmoe.bench import routes


def test_its_routes_are_distinct_experts() -> None:
    drawn = routes.drawn(20)
    assert (drawn.shape, drawn.dtype) == ((20, 48, 8), np.int32)
    assert (np.diff(np.sort(drawn, axis=2), axis=2) > 0).all()


def test_bytes_per_token() -> None:
    results = routes.run(tokens=100, rounds=1)
    assert results["packed"]["bytes_per_token"] <= 336
    assert results["json"]["bytes_per_token"] > 4 / 3 * 1536 * 100 / 101
    assert f"{results['packed']['bytes_per_token']:.1f}" in routes.table(results)
