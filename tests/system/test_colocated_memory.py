"""Trainer and engine on the same devices in turn: who sleeps has given its memory back, and no switch keeps any. Memory is that of the
processes alone, without pages of files (`benchmarks.colocated.owned`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import colocated
from tests.system.runs import summary_of
from tests.system.test_colocated import PARTS

pytestmark = [pytest.mark.system, pytest.mark.thorough]


def test_who_sleeps_holds_nothing_and_no_switch_keeps_any(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    found = colocated.memory_of(directory, 40, "colocated")
    assert found["engine_MB"] > 200
    assert found["freed"] > 0.95
    assert found["peak_MB"] < 1.05 * max(sum(sides.values()) for sides in found["MB"].values()), "never what both hold while they work"
    for side, states in found["growth"].items():
        for state, one in states.items():
            assert one["interval_95"][0] < 0.005e6 * found["engine_MB"], (side, state, one)
    summary = summary_of(directory)
    assert summary["switch_seconds"].keys() == {*PARTS}
    assert summary["trainer_idle_share"] is None
    assert summary["engine_idle_share"] < 0.9, "its own turns, not the trainer's"
