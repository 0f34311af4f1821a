"""A short part of `make fuzz`, with the same draws in every run."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.fuzz import endpoints, frames
from tests.fuzz.__main__ import MAX_TURN_CPU_S
from tests.system.runs import wait_for


def test_a_controller_outlives_what_members_and_strangers_send(tmp_path: Path) -> None:
    attacked = frames.Attacked(tmp_path)
    try:
        answers = frames.member(attacked, Random(0), 250)
        assert answers["sent"] == answers["answered"] + answers["lost_with_their_run"] == 250
        assert answers["answered"] > 125
        assert frames.stranger(attacked, Random(0), 200)["answers_of_the_run"] == 0
        frames.works(attacked)
        assert wait_for(lambda: len(attacked.vitals()) > 1, 60)
        assert max(one["worst_turn_cpu_s"] for one in attacked.vitals()[1:]) < MAX_TURN_CPU_S
    finally:
        attacked.close()


@pytest.mark.parametrize("path", endpoints.BODIES)
def test_the_endpoint_of_episodes_answers_every_body(path: str) -> None:
    statuses = endpoints.openai(path, Random(0), 100)
    assert statuses["400"] > 20
    assert statuses["200"] > 5
