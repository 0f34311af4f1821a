"""What ranks that meet engines agree on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import launch

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made: dict[str, Any] = launch.run("meetings", 2, tmp_path_factory.mktemp("meetings"))
    return made


def test_every_rank_says_why_rank_0_cannot_start_the_receivers(found: dict[str, Any]) -> None:
    """The supervisor shows one line, and whichever rank's it is, it is the cause; of a very long one, its beginning."""
    first, second = found["fails"]
    assert first.startswith("engine.0 did not start: unrecognized arguments: --no-such-argument")
    assert first.startswith(second[:1000])
    assert len(second.encode()) > 2000


def test_a_version_is_sent_again_while_all_ranks_have_its_weights(found: dict[str, Any]) -> None:
    assert found["again"] == [[True, True, False]] * 2
