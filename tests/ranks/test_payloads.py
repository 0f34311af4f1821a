"""Where trajectories lie (queue.payloads) changes nothing of what is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncmoe.config.model import MadeModel
from asyncmoe.models.make import make_model
from tests.ranks import launch
from tests.redis_server import LocalRedis, needed

pytestmark = [pytest.mark.ranks, needed()]


@pytest.mark.parametrize(
    "layout", ["tp=2", pytest.param("tp=1", marks=pytest.mark.thorough), pytest.param("pp=2", marks=pytest.mark.thorough)]
)
def test_a_run_is_the_same_to_the_bit_with_its_trajectories_in_redis(tmp_path: Path, layout: str) -> None:
    make_model(tmp_path / "hf", MadeModel(), seed=0)
    server = LocalRedis(tmp_path / "redis", {"maxmemory-policy": "noeviction"})
    try:
        queues = ({}, {"payloads": "redis", "redis": server.url})
        found = launch.run("payloads", 2, tmp_path, str(tmp_path), layout, *(json.dumps(queue) for queue in queues))
        with server.client() as client:
            assert not client.keys("asyncmoe:*:payload:*"), "what was trained is deleted"
    finally:
        server.close()
    for rank in found:
        ours, redis = rank
        assert redis["steps"] == ours["steps"]  # losses, norms and all other figures of each update
        assert redis["weights"] == ours["weights"]
        assert len({str(step) for step in ours["steps"]}) == 4
    assert found[0][0]["fetches"]
    assert not found[0][1]["fetches"], "the controller sent nothing"
