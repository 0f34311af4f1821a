"""An engine whose ranks are spread over two server processes, as over two machines, computes and takes weights as one of one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from asyncmoe.engines import backend
from asyncmoe.engines.engine import EngineProcess
from asyncmoe.engines.nodes import MeetingPlace, NodePlace
from asyncmoe.engines.types import Sampling
from tests.engine.conftest import make, settings
from tests.engine.oracle import Oracle, largest_difference, perturbed
from tests.engine.test_direct import Stage, wrong

pytestmark = [pytest.mark.engine, pytest.mark.ranks]
ROOM = ["--mem-fraction-static", "0.9"]
"""SGLang takes for its weights what other programs take of the machine's memory while it loads them."""
beside: dict[int, list[EngineProcess]] = {}
"""The other nodes of an engine, by the identity of the first."""
PROMPTS = ((30, 40, 50, 60, 70), tuple(range(3, 90)))


@pytest.fixture(scope="module")
def start(model: Path, runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Stage]]:
    """Starts an engine of two ranks on so many nodes."""
    folder = tmp_path_factory.mktemp("nodes")
    checkpoints = [Oracle(model)]
    checkpoints += [perturbed(checkpoints[0], folder / name, seed) for name, seed in (("a", 1), ("b", 2))]
    started, meetings = list[EngineProcess](), list[MeetingPlace]()

    async def begin(nodes: int) -> Stage:
        sizes = {"max_total_tokens": 8192, "tp": 2, "ep": 2, "nodes": nodes, "start_timeout_s": 600}
        config = settings(model, folder / f"run-{nodes}", **sizes, args=ROOM)
        meeting = MeetingPlace(None)
        meetings.append(meeting)
        places = [NodePlace(node, meeting.url) for node in range(nodes)] if nodes > 1 else [None]
        engine, *others = [backend.start("engine.0", config, 0, config.run.dir, place=place) for place in places]
        started.extend((engine, *others))
        rig = await make(config, [engine], runner.run)
        beside[id(rig.engine)] = others
        await engine.wait_ready()
        rig.coordinator.engines_started()
        return Stage(rig, checkpoints, folder, await engine.client.checksums(30.0))

    async def stop() -> None:
        await asyncio.gather(*(engine.stop() for engine in started))
        for meeting in meetings:
            meeting.close()

    try:
        yield lambda nodes: runner.run(begin(nodes))
    finally:
        runner.run(stop())


@pytest.fixture(scope="module")
def whole(start: Callable[[int], Stage]) -> Stage:
    """An engine of two ranks in one server."""
    return start(1)


@pytest.fixture(scope="module")
def parted(start: Callable[[int], Stage]) -> Stage:
    """An engine of two ranks in two servers."""
    return start(2)


def servers(stage: Stage) -> list[psutil.Process]:
    """The servers of an engine's nodes, node 0 first."""
    nodes: list[Any] = [stage.rig.engine, *beside[id(stage.rig.engine)]]
    return [psutil.Process(node._child.pid) for node in nodes]


def greedy(stage: Stage) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Tokens and log-probabilities of the likeliest responses."""
    client = stage.rig.engine.client
    sampling = Sampling(1.0, 24, (), top_k=1)
    said = [stage.rig.run(client.generate(prompt, sampling, f"salt {stage.next}", 60.0)) for prompt in PROMPTS]
    return [(tuple(one.tokens), tuple(one.logprobs)) for one in said]


def check_greedy(stage: Stage, oracle: Oracle) -> None:
    """Each token is the likeliest of transformers', with its log-probability."""
    for prompt, (tokens, logprobs) in zip(PROMPTS, greedy(stage), strict=True):
        assert len(tokens) == 24
        with torch.no_grad():
            table = oracle.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        likeliest = table.max(-1)
        assert likeliest.indices.tolist() == list(tokens)
        assert largest_difference(logprobs, likeliest.values.tolist()) < 1e-4


def test_two_nodes_say_what_transformers_says(parted: Stage) -> None:
    assert parted.loaded == parted.expected(parted.checkpoints[0])
    check_greedy(parted, parted.checkpoints[0])


@pytest.mark.thorough
def test_two_nodes_say_what_two_ranks_of_one_node_say(whole: Stage, parted: Stage) -> None:
    assert whole.loaded == parted.loaded == whole.expected(whole.checkpoints[0])
    assert greedy(parted) == greedy(whole)


def test_only_node_0_listens_once_they_have_met(parted: Stage) -> None:
    head, other = servers(parted)
    (port,) = {c.laddr.port for c in head.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert parted.rig.engine.url.endswith(f":{port}")
    assert not [c for c in other.net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def test_the_ranks_of_both_nodes_take_new_weights(parted: Stage) -> None:
    _, a, b = parted.checkpoints
    several = list(zip((a, b, a), parted.versions(3), strict=True))
    found = parted.rig.run(parted.publish(2, {"tp=2": several}, limit_s=600.0))
    assert not found.failed, found.failed
    assert [outcome["error"] for outcome in found.outcomes[0]] == [None] * 3
    assert not any(names for oracle, version in several for names in wrong(found.arrived[version], parted.expected(oracle)))
    assert parted.rig.run(parted.rig.engine.client.weights_version()) == several[-1][1]
    check_greedy(parted, a)
