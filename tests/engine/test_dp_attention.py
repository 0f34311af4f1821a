"""Engines with data-parallel attention (`engines.dp_attention`): each rank holds what SGLang's own loader makes of a checkpoint, before and
after updates, all groups compute what transformers computes, and every token has the version that sampled it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from asyncmoe.config.rollout import Interruption
from asyncmoe.engines import backend
from asyncmoe.engines.engine import EngineProcess
from asyncmoe.engines.nodes import MeetingPlace, NodePlace
from asyncmoe.engines.types import Sampling
from tests import families
from tests.configs import minimal
from tests.engine.conftest import PROMPT, family, running, settings
from tests.engine.oracle import Oracle, largest_difference, with_others
from tests.engine.test_direct import Stage, wrong
from tests.engine.test_families import check_routes
from tests.engine.test_overlap import CLIENTS, Load, alive, certain, check_records, reference
from tests.system.runs import command_line

__all__ = ["certain", "reference"]
pytestmark = [pytest.mark.engine, pytest.mark.ranks]
SIZES = {
    "deepseek": {"tp": 4, "ep": 2, "dp_attention": 2},
    "glm": {"tp": 2, "ep": 2, "dp_attention": 2},
    "moonlight": {"tp": 4, "dp_attention": 4},
    "qwen3": {"tp": 4, "dp_attention": 2},
    "qwen3_moe": {"tp": 4, "ep": 4, "dp_attention": 2},
}
"""By model; with one and two ranks in a group, and experts whole and divided."""


@pytest.fixture(params=[name if name == "deepseek" else pytest.param(name, marks=pytest.mark.thorough) for name in SIZES])
def grouped(request: pytest.FixtureRequest, runner: asyncio.Runner, tmp_path: Path) -> Iterator[Stage]:
    first = Oracle(families.write(tmp_path / "first", request.param))
    config = settings(first.path, tmp_path / "run", max_total_tokens=8192, start_timeout_s=600, **SIZES[request.param])
    with running(config, runner) as rig:
        yield Stage(rig, with_others(first, tmp_path), tmp_path, runner.run(rig.engine.client.checksums(30.0)))


def check_groups(stage: Stage, oracle: Oracle) -> None:
    """Every group answers requests of several lengths at once, and the pool spreads others over the groups."""
    groups = stage.rig.config.engines.dp_attention

    async def one(at: int) -> float:
        prompt, sampling = (*PROMPT, *range(10, 10 + 3 * at)), Sampling(1.0, 6 + 5 * at, ())
        said = await stage.rig.engine.client.generate(prompt, sampling, f"{stage.next}", 60.0, dp_rank=at % groups)
        return largest_difference(said.logprobs, oracle.logprobs(prompt, said.tokens, 1.0))

    async def all_at_once() -> list[float]:
        return await asyncio.gather(*map(one, range(3 * groups)))

    assert max(stage.rig.run(all_at_once())) < 1e-5


def test_ranks_hold_and_compute_what_they_are_sent(grouped: Stage) -> None:
    first, a, b = grouped.checkpoints
    assert wrong(grouped.loaded, grouped.rig.expected(first)) == [[]] * grouped.rig.config.engines.tp
    check_groups(grouped, first)
    grouped.published(2, {"tp=2": list(zip((a, b, a), grouped.versions(3), strict=True))}, limit_s=600.0)
    check_groups(grouped, a)
    (version,) = grouped.versions(1)
    grouped.rig.run(grouped.rig.sender.publish(version, b.weights, grouped.rig.expected(b), buckets=1))
    check_groups(grouped, b)
    check_routes(grouped, b)
    server, controller = family(grouped.rig.engine)[0], family(grouped.rig.engine, "data_parallel_controller")[0]
    ports = [c.laddr.port for one in (server, controller) for c in one.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert ports == [int(grouped.rig.engine.url.rpartition(":")[2])], "requests reach groups through files"


def test_ranks_of_two_nodes_are_reached_through_encrypted_ports(runner: asyncio.Runner, tmp_path: Path) -> None:
    """Each node has one rank, which attends to requests of its own; node 0 takes them all."""
    first, place = Oracle(families.write(tmp_path / "first", "deepseek")), MeetingPlace("127.0.0.2")
    sizes = {"tp": 2, "dp_attention": 2, "nodes": 2, "max_total_tokens": 8192, "dtype": "float32", "start_timeout_s": 600}
    config, key = minimal(tmp_path / "run", first.path, engines=sizes, cluster={"network": "hostname"}), zmq.curve_keypair()[1].decode()

    def start() -> list[EngineProcess]:
        nodes = [NodePlace(node, place.url, key) for node in range(2)]
        return [backend.start("engine.0", config, 0, host="127.0.0.2", key="k", place=node) for node in nodes]

    try:
        with running(config, runner, start=start) as rig:
            check_groups(Stage(rig, [first], tmp_path, ()), first)
            processes = [one for node in rig.engines for one in family(node) if "scheduler" not in command_line(one)]
            ports = {c.laddr.port for one in processes for c in one.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
            ports -= {int(rig.engine.url.rpartition(":")[2])}
            assert len(ports) >= 4
            assert not any(accepts(port, None) for port in ports)
            assert any(accepts(port, key) for port in ports)
    finally:
        place.close()


def accepts(port: int, key: str | None) -> bool:
    """Whether a port takes a connection that sends."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        agreed = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        if key is not None:
            public = zmq.curve_public(key.encode())
            socket.curve_secretkey, socket.curve_publickey, socket.curve_serverkey = key.encode(), public, public
        socket.connect(f"tcp://127.0.0.2:{port}")
        return bool(agreed.poll(1000))


@pytest.fixture(scope="module")
def load(certain: Path, runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    folder = tmp_path_factory.mktemp("groups")
    sizes = {"tp": 2, "ep": 2, "dp_attention": 2, "max_running": 12, "max_total_tokens": 8192, "start_timeout_s": 600}
    with running(settings(certain, folder, **sizes, args=["--chunked-prefill-size", "128"]), runner) as rig:
        yield Load(rig, folder / "pauses")


@pytest.mark.parametrize(("interruption", "aborts"), [("in_place", False), ("in_place", True), ("abort_resume", False), ("retract", False)])
def test_every_token_has_its_version(load: Load, reference: Any, thorough: bool, interruption: Interruption, aborts: bool) -> None:
    cuts, answered, load.records = load.cuts, load.answered, []
    load.rig.run(load.updates(60 if thorough else 10, interruption, aborts))
    assert load.answered - answered >= CLIENTS
    if interruption == "in_place" and not aborts:
        assert load.cuts > cuts
        check_records(load, reference)
    assert alive(load)
