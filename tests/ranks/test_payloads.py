"""Where trajectories lie (queue.payloads) changes nothing of what is trained."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.config.model import MadeModel
from asyncmoe.models.make import make_model
from tests.ranks import launch
from tests.redis_server import LocalRedis, needed
from tests.unit.ray_head import cluster

pytestmark = pytest.mark.ranks
MORE = [pytest.param(layout, marks=pytest.mark.thorough) for layout in ("tp=1", "pp=2")]


def same_to_the_bit(tmp_path: Path, layout: str, queue: dict[str, Any]) -> None:
    """A run of four steps with real ranks, with its trajectories in the controller and then in a store."""
    make_model(tmp_path / "hf", MadeModel(), seed=0)
    found = launch.run("payloads", 2, tmp_path, str(tmp_path), layout, "{}", json.dumps(queue))
    for ours, stored in found:
        assert stored["steps"] == ours["steps"]  # losses, norms and all other figures of each update
        assert stored["weights"] == ours["weights"]
        assert len({str(step) for step in ours["steps"]}) == 4
    assert found[0][0]["fetches"]
    assert not found[0][1]["fetches"], "the controller sent nothing"


@needed()
@pytest.mark.parametrize("layout", ["tp=2", *MORE])
def test_a_run_is_the_same_to_the_bit_with_its_trajectories_in_redis(tmp_path: Path, layout: str) -> None:
    server = LocalRedis(tmp_path / "redis", {"maxmemory-policy": "noeviction"})
    try:
        same_to_the_bit(tmp_path, layout, {"payloads": "redis", "redis": server.url})
        with server.client() as client:
            assert not client.keys("asyncmoe:*:payload:*"), "what was trained is deleted"
    finally:
        server.close()


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("ray") is None, reason="without the package ray")
def test_a_run_is_the_same_to_the_bit_with_its_trajectories_in_ray(tmp_path: Path) -> None:
    with cluster():
        same_to_the_bit(tmp_path, "tp=1", {"payloads": "ray"})
