"""The queue bench: what it measures is right, whatever its speed."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil

import msgspec
import pytest

from asyncmoe.errors import InvariantBroken, WaitTimeout
from asyncmoe.trajectory import decode, encode
from benchmarks import queue, queue_floor, queue_peers
from benchmarks.queue_rank import Job, Took

SIZES = queue.QueueCase(steps=2, batch=16, tokens=40, ask=3)
TOOK = Took(begin=10.0, end=12.0, processor=1.0, requests=4, trajectories=16, tokens=640, bytes=10**9)


def test_its_trajectories_are_taken_by_the_queue_and_have_the_routes_of_their_shape() -> None:
    made = queue.trajectories(queue.SHAPES["qwen3-30b-a3b"], 40)
    routes = decode(encode(made[0])).routes
    assert routes is not None
    assert (routes.rows, len(routes.layers), routes.top_k, routes.experts) == (39, 48, 8, 128)
    assert len({bytes(t.tokens.data) for t in made}) == queue.DISTINCT


def test_figures_are_over_the_time_from_the_first_to_the_last() -> None:
    found = queue.figures([TOOK, msgspec.structs.replace(TOOK, end=14.0)], server_s=2.0, put_s=8.0)
    assert found == {
        "trajectories_per_s": 8.0,
        "GBps": 0.5,
        "requests_per_s": 2.0,
        "put_per_s": 4.0,
        "processor_s_per_GB": 2.0,
    }


def test_a_trajectory_that_did_not_come_out_is_an_error() -> None:
    queue.expect_all([TOOK, TOOK], SIZES)
    with pytest.raises(InvariantBroken, match="15"):
        queue.expect_all([TOOK, Took(10.0, 12.0, 1.0, 4, 15, 600, 1)], SIZES)


def test_real_ranks_take_all_of_it_by_both_transports() -> None:
    results = queue.run(SIZES, rounds=1, shapes=("small",), peers=False)
    shape = results["shapes"]["small"]
    for way in ("local", "local_share", "tcp"):
        assert all(rate > 0 for rate in shape["ways"][way].values())
    assert shape["ways"]["redis"] == shape["ways"]["ray"] == "not asked for"
    said = queue.table(results)
    assert f"{shape['ways']['local']['trajectories_per_s']:.0f}" in said
    assert "not asked for" in said


def test_a_rank_that_dies_is_named() -> None:
    async def start() -> None:
        await queue.Ranks.start([Job("asyncmoe", "no rendezvous", 0, 1, 16, 1)])

    with pytest.raises(WaitTimeout, match="rank 0"):
        asyncio.run(start())


def test_an_absent_peer_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert queue_peers.absent("ray") == "absent: the Python package ray is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert queue_peers.absent("redis") == "absent: there is no redis-server"
    assert queue_peers.absent("ray") == ""


def test_the_floor_counts_bytes() -> None:
    assert all(rate > 0 for rate in queue_floor.run(1000, 10).values())
