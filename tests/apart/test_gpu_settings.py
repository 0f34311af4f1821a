"""What saves memory on GPUs, as Megatron is given it, and the offloaded optimizer's step; what refuses it: test_switches.py."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from asyncmoe.config import Config
from asyncmoe.config.trainer import MemorySection
from asyncmoe.launch.torchrun import trainer_environment
from asyncmoe.models import family_of
from asyncmoe.platform import megatron
from asyncmoe.platform.kernels import Kernels
from asyncmoe.platform.megatron import adam
from asyncmoe.trainer.model import step_threads
from asyncmoe.trainer.model.gpu_settings import ROWS, float8_arguments, optimizer_arguments
from asyncmoe.trainer.model.mesh import Mesh

megatron.prepare()

from megatron.core import fp8_utils  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, optimizer_config  # noqa: E402
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer  # noqa: E402
from megatron.core.transformer import transformer_config  # noqa: E402

from asyncmoe.trainer.model import layers, optimizer  # noqa: E402
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


# ---------------------------------------------------------------- the step of an offloaded optimizer


class OnGpu(torch.nn.Parameter):
    """Megatron's hybrid optimizer offloads what says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.fixture
def hybrid(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An offloaded parameter whose gradient is 1, as after loading a checkpoint that does not choose a kernel."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    parameter = OnGpu(torch.ones(8, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    return HybridDeviceOptimizer([parameter], 1.0, torch.optim.AdamW, torch.optim.AdamW, param_update_in_fp32=True, lr=0.1)


def test_the_cpus_adam_has_the_ranks_share_of_the_cores_unless_the_user_chose(hybrid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    hybrid.cpu_optimizers[0].register_step_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    before, config = torch.get_num_threads(), SimpleNamespace(optimizer_cpu_offload=True)
    outer: Any = SimpleNamespace(config=config, get_grad_norm=float, step=lambda: (hybrid.step() is None, 1.0, None))
    for cores, offload, given in ((10, True, {}), (1, True, {}), (10, False, {}), (10, True, {"OMP_NUM_THREADS": "1"})):
        monkeypatch.setattr(step_threads, "cores", lambda cores=cores: cores)
        config.optimizer_cpu_offload = offload
        with mock.patch.dict(os.environ, trainer_environment(given) | {"LOCAL_WORLD_SIZE": "2"}):
            optimizer.step(outer, lambda _: True)
        seen.append(torch.get_num_threads())
    assert seen == [5, before, 1, before, before, before, before, before]
    assert hybrid.param_groups[0]["params"][0].tolist() == pytest.approx([0.6] * 8, abs=0.01)


def test_a_containers_quota_bounds_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_threads, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert step_threads.cores() == 8
    for text, cores in (("max 100000", 8), ("350000 100000", 3), ("1600000 100000", 8)):
        (tmp_path / "cpu.max").write_text(text)
        assert step_threads.cores() == cores


def test_the_cpus_adam_is_one_kernel_whatever_the_checkpoint_chose(hybrid: Any) -> None:
    adam.fuse(SimpleNamespace(optimizer=hybrid))
    hybrid.step()
    assert hybrid.cpu_optimizers[0].param_groups[0]["fused"] is True
