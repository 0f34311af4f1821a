"""What ranks compute together, next to torch on whole tensors: attention over sequences and an output layer that are divided."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import launch

pytestmark = pytest.mark.ranks
MORE = [pytest.param("context", ranks, ["20"], marks=pytest.mark.thorough) for ranks in (2, 4)]


@pytest.mark.parametrize(("worker", "ranks", "arguments"), [("head", 2, []), ("context", 3, ["20"]), *MORE])
def test_ranks_compute_what_one_does(worker: str, ranks: int, arguments: list[str], tmp_path: Path) -> None:
    for errors in launch.run(worker, ranks, tmp_path, *arguments):
        assert max(errors.values()) < 4e-6, errors
