"""Engines of float8: what arrives from trainers in float32 is, bit for bit, what SGLang's own quantisation makes of the same weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncmoe.models import load_hf_config
from tests import families, float8
from tests.checksums import engine_checksums
from tests.engine.conftest import running, settings
from tests.engine.oracle import Oracle, with_others
from tests.engine.test_direct import Checksums, Stage, difference, generate, wrong

pytestmark = [pytest.mark.engine, pytest.mark.ranks]


class Quantised:
    """A checkpoint as a trainer has it, in float32, and as an engine of float8 should."""

    def __init__(self, plain: Oracle, served: Path, folder: Path) -> None:
        self.path, self._hf = plain.path, load_hf_config(served)
        self.weights = float8.quantised_weights(self._hf, plain.weights)
        self.oracle = Oracle(families.rewrite(plain.path, folder, float8.dequantised_weights(self.weights)))

    def expected(self, stage: Stage) -> Checksums:
        return engine_checksums(self._hf, stage.rig.config.engines, self.weights)


ENGINES = [pytest.param(*one, marks=pytest.mark.thorough) for one in (("qwen3_moe", 2), *((kind, 1) for kind in float8.MODELS))]


@pytest.mark.parametrize(("kind", "tp"), ENGINES)
def test_an_engine_holds_what_sglang_would_have_quantised(kind: str, tp: int, runner: asyncio.Runner, tmp_path: Path) -> None:
    """Under every layout of the trainer, and by the other path too; and it computes with them what transformers does."""
    first = Oracle(float8.plain_model(tmp_path / "plain", kind))
    float8.write(first.path, tmp_path / "served")
    with running(settings(tmp_path / "served", tmp_path / "run", max_total_tokens=4096, tp=tp), runner) as rig:
        stage = Stage(rig, with_others(first, tmp_path), tmp_path, runner.run(rig.engine.client.checksums(30.0)))
        kept = [Quantised(one, tmp_path / "served", tmp_path / f"back-{n}") for n, one in enumerate(stage.checkpoints)]
        assert wrong(stage.loaded, kept[0].expected(stage)) == [[]] * tp
        assert difference(runner.run(generate(stage)), kept[0].oracle) < 1e-5
        _, a, b = stage.checkpoints
        for ranks, layouts in ((1, {"tp=1": [(a, 1), (b, 2)]}), (2, {"tp=2": [(a, 3)], "pp=2": [(b, 4)], "ep=2": [(a, 5)]})):
            found = runner.run(stage.publish(ranks, layouts))
            assert not found.failed, found.failed
            assert [outcome["error"] for outcome in found.outcomes[0]] == [None] * sum(map(len, layouts.values()))
            for several in layouts.values():
                for oracle, version in several:
                    assert wrong(found.arrived[version], kept[stage.checkpoints.index(oracle)].expected(stage)) == [[]] * tp
        assert difference(runner.run(generate(stage)), kept[1].oracle) < 1e-5
        runner.run(stage.rig.sender.publish(6, kept[2].weights, kept[2].expected(stage), buckets=1))
        assert difference(runner.run(generate(stage)), kept[2].oracle) < 1e-5
