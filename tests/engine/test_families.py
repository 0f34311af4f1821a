"""Real engines of every family: SGLang computes the same as transformers, for the checkpoint and for weights sent by a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from asyncmoe.engines.decode import routed_experts
from asyncmoe.engines.types import Sampling
from asyncmoe.models import family_of, load_hf_config
from asyncmoe.trajectory import Recording, decode_routes
from asyncmoe.trajectory.sent_routes import MAGIC
from tests import families
from tests.engine.conftest import PROMPT, difference, running, settings
from tests.engine.oracle import Oracle, routes, with_others
from tests.engine.test_direct import Stage, wrong

pytestmark = [pytest.mark.engine, pytest.mark.ranks]
FEW = "deepseek"
"""The family with the most of its own; the others in a thorough test."""
every = [name if name == FEW else pytest.param(name, marks=pytest.mark.thorough) for name in families.MODELS]


@pytest.fixture(params=every)
def stage(request: pytest.FixtureRequest, runner: asyncio.Runner, tmp_path: Path) -> Iterator[Stage]:
    first = Oracle(families.write(tmp_path / "first", request.param))
    # float32, as the checkpoint's
    with running(settings(first.path, tmp_path / "run", max_total_tokens=4096, dtype="auto"), runner) as rig:
        yield Stage(rig, with_others(first, tmp_path), tmp_path, runner.run(rig.engine.client.checksums(30.0)))


def test_an_engine_computes_what_it_is_sent(stage: Stage) -> None:
    """Test both paths; with latent attention every token uses the tensors that SGLang derives from the new weights."""
    first, a, b = stage.checkpoints
    assert wrong(stage.loaded, stage.rig.expected(first)) == [[]]
    assert difference(stage.rig.run(stage.rig.generate()), first) < 1e-5
    stage.published(1, {"tp=1": [(a, 1), (b, 2), (a, 3)]})
    assert difference(stage.rig.run(stage.rig.generate()), a) < 1e-5
    stage.rig.run(stage.rig.sender.publish(4, b.weights, stage.rig.expected(b), buckets=1))
    assert difference(stage.rig.run(stage.rig.generate()), b) < 1e-5
    check_routes(stage, b)


def check_routes(stage: Stage, oracle: Oracle) -> None:
    """For every token the engine reports the experts that transformers' routers choose."""
    hf = load_hf_config(oracle.path)
    routing = family_of(hf).routing(hf)
    assert (routing is None) == (hf["model_type"] in families.DENSE)
    if routing is None:
        return
    sampling = Sampling(1.0, 16, (), recording=Recording(routing, masks=False, vocabulary=hf["vocab_size"]))
    answer = stage.rig.run(stage.rig.engine.client.generate(PROMPT, sampling, "x", 60.0))
    seen = np.array([*PROMPT, *answer.tokens.tolist()])
    assert bytes(answer.routes[: len(MAGIC)]) == MAGIC, "the engine did not pack its routes"
    reported = decode_routes(routed_experts(answer.routes, routing, tokens=len(seen), routed=0, key="x"), "x")
    np.testing.assert_array_equal(np.sort(reported), np.sort(routes(oracle.model, seen)))
