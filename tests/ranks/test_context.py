"""Attention over sequences that are divided among context-parallel ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import launch

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.thorough), pytest.param(4, marks=pytest.mark.thorough)])
def test_ranks_attend_as_one_does(ranks: int, tmp_path: Path) -> None:
    for errors in launch.run("context", ranks, tmp_path, "20"):
        assert max(errors.values()) < 4e-6, errors
