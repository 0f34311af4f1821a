"""With Transformer Engine or apex installed, Megatron takes them; each test runs where its package is."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

from asyncmoe.config import parse  # noqa: E402
from asyncmoe.config.generation import MadeModel  # noqa: E402
from asyncmoe.models import load_hf_config  # noqa: E402
from asyncmoe.models.make import make_model  # noqa: E402
from asyncmoe.platform import kernels  # noqa: E402
from asyncmoe.trainer import mesh, model, optimizer  # noqa: E402


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> object:
    path: Path = tmp_path_factory.mktemp("kernels")
    make_model(path / "hf", MadeModel(), seed=0)
    values = {"run": {"dir": str(path), "steps": 1}, "model": {"path": str(path / "hf")}, "task": {"kind": "arithmetic"}}
    config = parse(values)
    place = mesh.start(config.trainer)
    made = model.build(load_hf_config(path / "hf"), config, place)
    model.load_hf(made, path / "hf")
    return made, optimizer.build(config, made)


@pytest.mark.skipif(not kernels.detect().transformer_engine, reason="Transformer Engine is not installed")
def test_transformer_engine_builds_the_layers_and_the_grouped_experts(built: tuple[model.Model, object]) -> None:
    names = {type(module).__name__ for module in built[0].module.modules()}
    assert "TEGroupedMLP" in names
    assert "TELayerNormColumnParallelLinear" in names


@pytest.mark.skipif(
    not (kernels.detect().apex or kernels.detect().transformer_engine), reason="neither apex nor Transformer Engine is installed"
)
def test_the_fused_adam_is_used(built: tuple[object, optimizer.MegatronOptimizer]) -> None:
    parts = getattr(built[1], "chained_optimizers", [built[1]])
    assert {type(part.optimizer).__name__ for part in parts} == {"FusedAdam"}
