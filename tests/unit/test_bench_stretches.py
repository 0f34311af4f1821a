"""Pairs of stretches of several runs make the figures of all of them."""

from __future__ import annotations

import pytest

from benchmarks.stretches import Pairs


def test_pairs_of_several_runs_count_together() -> None:
    plain, kept = [1e-4 * (1 + i % 3) for i in range(24)], [1.02e-4 * (1 + i % 3) for i in range(24)]
    whole = Pairs(plain, kept, 500.0).figures()
    parts = [Pairs(plain[:12], kept[:12], 490.0).figures(), Pairs(plain[12:], kept[12:], 510.0).figures()]
    joined = Pairs.joined(parts).figures()
    assert joined["share"] == pytest.approx(whole["share"], abs=1e-4)
    assert joined["high"] - joined["low"] < parts[0]["high"] - parts[0]["low"] + 1e-4
    assert (joined["tokens"], len(joined["plain_us"])) == (500, 24)
