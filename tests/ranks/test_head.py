"""The output layer in blocks, of two tensor-parallel ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import launch

pytestmark = pytest.mark.ranks


def test_ranks_that_share_a_vocabulary_compute_what_one_does(tmp_path: Path) -> None:
    for errors in launch.run("head", 2, tmp_path):
        assert max(errors.values()) < 4e-6, errors
