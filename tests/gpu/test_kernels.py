"""With Transformer Engine or apex installed Megatron takes them, and without them torch's kernels; each computes what the others do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

from asyncmoe import installed  # noqa: E402
from asyncmoe.config import Config  # noqa: E402
from asyncmoe.config.model import MadeModel  # noqa: E402
from asyncmoe.models import load_hf_config  # noqa: E402
from asyncmoe.models.make import make_model  # noqa: E402
from asyncmoe.platform import kernels, megatron  # noqa: E402

megatron.prepare()

from asyncmoe.platform.megatron.packed_attention import PackedSequences  # noqa: E402
from asyncmoe.trainer.model import (  # noqa: E402
    gpt,
    mesh,
    optimizer,
)
from tests.configs import minimal  # noqa: E402

ENGINE = kernels.detect().transformer_engine
BOUNDS = [0, 7, 40, 64]
LIMIT = 2e-2
"""Of bfloat16, relative to the largest."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("kernels")
    make_model(made / "hf", MadeModel(), seed=0)
    return made


@pytest.fixture(scope="module")
def place(path: Path) -> Any:
    started = mesh.start(configured(path).trainer)
    yield started
    mesh.stop()


def configured(path: Path, **trainer: Any) -> Config:
    return minimal(path, path / "hf", trainer=trainer)


def build(path: Path, place: Any, **trainer: Any) -> tuple[gpt.Model, Any]:
    config = configured(path, **trainer)
    made = gpt.build(load_hf_config(path / "hf"), config, place)
    gpt.load_hf(made, path / "hf")
    return made, optimizer.build(config, made)


def classes(made: gpt.Model) -> set[str]:
    return {type(module).__name__ for chunk in made.chunks for module in chunk.modules()}


def gradients(made: gpt.Model) -> dict[str, Any]:
    """Of the mean of the logits' squares, and the logits, by name."""
    (ddp,) = made.ddp
    ddp.zero_grad_buffer()
    tokens = torch.arange(BOUNDS[-1], device="cuda")[None] % 50
    packed = PackedSequences(torch.tensor(BOUNDS, dtype=torch.int32, device="cuda"), BOUNDS, 33)
    logits = ddp(tokens, torch.zeros_like(tokens), None, packed_seq_params=packed)
    logits.float().square().mean().backward()
    found = {name: value.main_grad.float() for name, value in gpt.named_tensors(made) if isinstance(value, torch.nn.Parameter)}
    return {"logits": logits.detach().float()} | {name: value.clone() for name, value in found.items()}


def error(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest, relative to the largest; of what both have, as layers of other classes have other names."""
    return max(float((one[name] - other[name]).abs().max() / other[name].abs().max()) for name in one.keys() & other.keys())


@pytest.mark.skipif(not ENGINE, reason="Transformer Engine is not installed")
def test_transformer_engine_builds_the_layers_and_the_grouped_experts(path: Path, place: Any) -> None:
    made, _ = build(path, place)
    assert {"TEGroupedMLP", "TELayerNormColumnParallelLinear"} <= classes(made)
    assert error(gradients(made), gradients(build(path, place, megatron={"transformer_impl": "local"})[0])) < LIMIT


@pytest.mark.skipif(not ENGINE, reason="Transformer Engine is not installed")
def test_a_fused_operation_is_the_unfused_one(path: Path, place: Any) -> None:
    made, _ = build(path, place)
    assert made.switches.moe_permute_fusion
    assert made.switches.apply_rope_fusion
    assert made.switches.gradient_accumulation_fusion
    assert error(gradients(made), gradients(build(path, place, megatron={"bias_activation_fusion": False})[0])) < LIMIT


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_that_torch_groups(path: Path, place: Any, dtype: str) -> None:
    local = {"transformer_impl": "local", "bias_activation_fusion": False}
    made, _ = build(path, place, dtype=dtype, megatron={**local, "moe_grouped_gemm": True})
    assert "GroupedExperts" in classes(made)
    alone, _ = build(path, place, dtype=dtype, megatron={**local, "moe_grouped_gemm": False})
    assert "SequentialMLP" in classes(alone)
    assert error(gradients(made), gradients(alone)) < (LIMIT if dtype == "bfloat16" else 1e-4)


def test_flash_attention_to_packed_sequences(path: Path, place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncmoe.platform.megatron import packed_attention as attention

    made, _ = build(path, place, megatron={"transformer_impl": "local"})
    assert attention.kernel("cuda", torch.bfloat16, 64) == "varlen"
    flash = gradients(made)
    monkeypatch.setattr(attention, "kernel", lambda *_: "each")
    assert error(flash, gradients(made)) < LIMIT


def test_adam_is_fused(path: Path, place: Any) -> None:
    _, adam = build(path, place)
    parts = [part.optimizer for part in getattr(adam, "chained_optimizers", [adam])]
    if kernels.detect().transformer_engine or installed.has("apex"):
        assert {type(part).__name__ for part in parts} == {"FusedAdam"}
    else:
        assert all(group["fused"] for part in parts for group in part.param_groups)
