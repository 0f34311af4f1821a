"""A launch ends with its first rank that fails, or when its time is over, and leaves no rank."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.ranks import launch
from tests.system.runs import wait_for

pytestmark = pytest.mark.ranks


def left(folder: Path) -> list[int]:
    """Ranks that still run."""
    return [pid for pid in (int(file.read_text()) for file in folder.glob("*.pid")) if runs(pid)]


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_rank_that_fails_ends_the_others_and_is_told(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"(?s)launched on 2 ranks: 1\n.*ValueError: this rank fails"):
        launch.run("launched", 2, tmp_path, str(tmp_path), "fails")
    assert len(list(tmp_path.glob("*.pid"))) == 2
    assert wait_for(lambda: not left(tmp_path), 60)


def test_ranks_that_take_too_long_are_ended(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"launched on 2 ranks: no end after 5 s"):
        launch.run("launched", 2, tmp_path, str(tmp_path), "waits", timeout_s=5)
    assert wait_for(lambda: not left(tmp_path), 60)
