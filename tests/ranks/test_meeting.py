"""A meeting with the engines that cannot be ends alike on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import launch

pytestmark = pytest.mark.ranks


def test_every_rank_says_why_rank_0_cannot_start_the_receivers(tmp_path: Path) -> None:
    """The supervisor shows one line, and whichever rank's it is, it is the cause; of a very long one, its beginning."""
    first, second = launch.run("meeting_fails", 2, tmp_path)
    assert first.startswith("engine.0 did not start: unrecognized arguments: --no-such-argument")
    assert first.startswith(second[:1000])
    assert len(second.encode()) > 2000
