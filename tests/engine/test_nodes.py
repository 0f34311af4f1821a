"""An engine whose ranks are spread over two server processes, as over two machines, works like one in a single process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from asyncmoe.engines import backend
from asyncmoe.engines.engine import EngineProcess
from asyncmoe.engines.nodes import MeetingPlace, NodePlace
from asyncmoe.engines.types import Sampling
from tests.engine.conftest import PROMPT, running, settings
from tests.engine.oracle import Oracle, largest_difference, with_others
from tests.engine.test_direct import Stage

pytestmark = [pytest.mark.engine, pytest.mark.ranks]
ROOM = ["--mem-fraction-static", "0.9"]
"""SGLang takes for its weights what other programs take of the machine's memory while it loads them."""
PROMPTS = (PROMPT, tuple(range(3, 90)))


@pytest.fixture(scope="module")
def parted(model: Path, runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """An engine of two ranks in two servers."""
    folder, meeting = tmp_path_factory.mktemp("nodes"), MeetingPlace(None)
    checkpoints = with_others(Oracle(model), folder)
    sizes = {"max_total_tokens": 8192, "tp": 2, "ep": 2, "nodes": 2, "start_timeout_s": 600}
    config = settings(model, folder / "run", **sizes, args=ROOM)

    def start() -> list[EngineProcess]:
        return [backend.start("engine.0", config, 0, place=NodePlace(node, meeting.url)) for node in range(2)]

    try:
        with running(config, runner, start=start) as rig:
            yield Stage(rig, checkpoints, folder, runner.run(rig.engine.client.checksums(30.0)))
    finally:
        meeting.close()


def servers(stage: Stage) -> list[psutil.Process]:
    """The servers of an engine's nodes, node 0 first."""
    return [psutil.Process(node._child.pid) for node in stage.rig.engines]


def check_greedy(stage: Stage, oracle: Oracle) -> None:
    """Each token is the likeliest of transformers', with its log-probability."""
    sampling = Sampling(1.0, 24, (), top_k=1)
    for prompt in PROMPTS:
        said = stage.rig.run(stage.rig.engine.client.generate(prompt, sampling, f"salt {stage.next}", 60.0))
        assert len(said.tokens) == 24
        with torch.no_grad():
            table = oracle.model(torch.tensor([[*prompt, *said.tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        likeliest = table.max(-1)
        assert likeliest.indices.tolist() == said.tokens.tolist()
        assert largest_difference(said.logprobs, likeliest.values.tolist()) < 1e-4


def test_two_nodes_say_what_transformers_says(parted: Stage) -> None:
    assert parted.loaded == parted.rig.expected(parted.checkpoints[0])
    check_greedy(parted, parted.checkpoints[0])


def test_only_node_0_listens_once_they_have_met(parted: Stage) -> None:
    head, other = servers(parted)
    (port,) = {c.laddr.port for c in head.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert parted.rig.engine.url.endswith(f":{port}")
    assert not [c for c in other.net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def test_the_ranks_of_both_nodes_take_new_weights(parted: Stage) -> None:
    _, a, b = parted.checkpoints
    several = list(zip((a, b, a), parted.versions(3), strict=True))
    parted.published(2, {"tp=2": several}, limit_s=600.0)
    assert parted.rig.run(parted.rig.engine.client.weights_version()) == several[-1][1]
    check_greedy(parted, a)
