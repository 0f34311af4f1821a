"""The bench of the ledger: its controller takes all that its workers say they have, and its worker holds what it is given."""

from __future__ import annotations

import pytest

from benchmarks import ledger
from benchmarks.ledger_case import LedgerCase


@pytest.mark.thorough  # what a bench measures has tests of its own
def test_cases_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "CASES", {"workers_2": LedgerCase(2, groups=4, steps=2, engines=3, idle_s=0.1)})
    monkeypatch.setattr(ledger, "TOKENS", 1024)
    results = ledger.run(rounds=1, shrink=64)
    assert results["workers_2"]["cpu_us_per_trajectory"] > 0
    assert results["held"]["trajectories"] == 2
    assert 0.2 < results["held"]["MB_each"] / 1024e-6 / 336 < 5, "a little more than packed routes"
    assert f"{results['workers_2']['cpu_us_per_trajectory']:,.0f}" in ledger.table(results)
