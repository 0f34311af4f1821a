"""What saves memory on GPUs, as Megatron is given it; what refuses it: test_switches.py."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncmoe.config import Config
from asyncmoe.config.trainer import MemorySection
from asyncmoe.models import family_of
from asyncmoe.platform import megatron
from asyncmoe.platform.kernels import Kernels
from asyncmoe.trainer.model.gpu_settings import ROWS, float8_arguments, optimizer_arguments
from asyncmoe.trainer.model.mesh import Mesh

megatron.prepare()

from megatron.core import fp8_utils  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, optimizer_config  # noqa: E402
from megatron.core.transformer import transformer_config  # noqa: E402

from asyncmoe.trainer.model import layers  # noqa: E402
from tests.configs import minimal  # noqa: E402
from tests.ranks import case  # noqa: E402

HALF = MemorySection(optimizer_offload=0.5)
AVERAGES = MemorySection(exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16")


def configured(**trainer: Any) -> Config:
    return minimal(trainer=trainer)


def test_the_optimizers_settings_are_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_config, "is_te_min_version", lambda *_, **__: True)
    assert optimizer_arguments(MemorySection()) == {}
    common: dict[str, Any] = {"bf16": True, "params_dtype": torch.bfloat16, "use_distributed_optimizer": True}
    made = OptimizerConfig(**common, **optimizer_arguments(HALF))
    assert (made.optimizer_cpu_offload, made.optimizer_offload_fraction, made.overlap_cpu_optimizer_d2h_h2d) == (True, 0.5, True)
    # Megatron then keeps no float32 weights of its own on the GPU (`_build_model_and_main_param_groups`).
    assert made.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    assert not made.store_param_remainders
    known = {field.name for field in fields(OptimizerConfig)}
    assert optimizer_arguments(AVERAGES).keys() <= known
    assert not any(name.startswith("optimizer_offload") for name in optimizer_arguments(AVERAGES))
    monkeypatch.setitem(common, "use_distributed_optimizer", False)
    with pytest.raises(AssertionError, match="distributed optimizer"):  # which asyncmoe.config refuses first
        OptimizerConfig(**common, **optimizer_arguments(HALF))


def test_float8_is_blockwise_and_leaves_weights_and_the_layers_at_the_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_config, "is_te_min_version", lambda *_, **__: True)
    monkeypatch.setattr(layers.kernels, "detect", lambda: Kernels(cuda=True, capability=(9, 0), transformer_engine=(2, 20)))
    monkeypatch.setattr(layers, "megatron_arguments", lambda on: {})  # Transformer Engine is not installed here
    hf = case.VARIANTS["plain"]
    config = case.config(tmp_path, ranks=1, precision="fp8", dtype="auto")
    family, _ = family_of(hf).megatron_config(hf)
    on = layers.switches(hf, config, torch.bfloat16)
    assert on.transformer_engine
    made = layers.transformer_config(family, config, torch.device("cpu"), torch.bfloat16, on)
    assert (made.fp8, made.fp8_recipe, made.fp8_param, made.fp8_dot_product_attention) == ("e4m3", "blockwise", False, False)
    assert (made.params_dtype, made.bf16, made.moe_router_dtype) == (torch.bfloat16, True, "fp32")
    bf16 = [number for number in range(made.num_layers) if fp8_utils.is_first_last_bf16_layer(made, number)]
    assert bf16 == [0, made.num_layers - 1]
    without = float8_arguments(configured(precision="fp8", edge_layers=0).trainer)
    assert not without["first_last_layers_bf16"]
    assert float8_arguments(configured().trainer) == {}


def test_rows_of_float8_are_whole_blocks_on_every_rank() -> None:
    sizes, ranks = dict.fromkeys(("pp", "vpp", "dp"), 1), {f"{name}_rank": 0 for name in ("tp", "pp", "dp")}
    place = Mesh(rank=0, world=4, tp=2, cp=2, device=torch.device("cpu"), backend="nccl", row_block=ROWS, **sizes, **ranks)
    assert place.grid.rows % (2 * 2 * ROWS) == 0
    assert replace(place, row_block=1).grid.rows == 2 * 2 * 2
