"""Worker: adapters in a model of the layers that Transformer Engine brings, which stand-ins of the same signatures take the place of: norms
inside the linear layers, and Megatron's own TEGroupedMLP. `lora_grouped.py RESULT REFERENCES LAYOUT...`
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from asyncmoe.errors import ConfigError
from asyncmoe.models import load_hf_config
from asyncmoe.platform import megatron
from asyncmoe.trainer.lora import attach
from asyncmoe.trainer.model import gpt, layers, mesh
from asyncmoe.trainer.model.switches import Switches
from tests.ranks import case, group, lora_case, parity
from tests.ranks.leaving import leave
from tests.ranks.lora import SEED, Job, adapter_job, forward_and_gradients

megatron.prepare()

from megatron.core.tensor_parallel import ColumnParallelLinear  # noqa: E402  only after the platform is prepared
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.mlp import MLPSubmodules  # noqa: E402
from megatron.core.transformer.moe.experts import TEGroupedMLP  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402


class TELayerNormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    def __init__(self, input_size: int, output_size: int, *, config: Any, **keywords: Any) -> None:
        super().__init__(input_size, output_size, config=config, **keywords)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))
        self.eps = config.layernorm_epsilon

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(F.rms_norm(x, (x.shape[-1],), self.layer_norm_weight, self.eps))


class Grouped(torch.nn.Module):
    """`forward` as TEGroupedLinear's: rows of all experts one after the other, and how many each has."""

    divided = (1, 1)

    def __init__(self, num_gemms: int, input_size: int, output_size: int, *, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        parts = pg_collection.expt_tp.size()
        shape = (output_size // (parts if self.divided[0] else 1), input_size // (parts if self.divided[1] else 1))
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", torch.nn.Parameter(torch.empty(shape)))

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, None]:
        parts = zip(torch.split(x, m_splits), self.parameters(), strict=True)
        return torch.cat([rows @ weight.t() for rows, weight in parts]), None


class ColumnGrouped(Grouped):
    divided = (1, 0)


class RowGrouped(Grouped):
    divided = (0, 1)


ON = Switches(True, "transformer_engine", *[False] * 8)


def spec(config: Any, on: Switches, chunk: int | None) -> Any:
    block = local_spec(config, replace(on, transformer_engine=False, experts="sequential"), chunk)
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = IdentityOp
        layer.submodules.self_attention.submodules.linear_qkv = TELayerNormColumnParallelLinear
        mlp = layer.submodules.mlp
        if hasattr(mlp.submodules, "experts"):
            mlp.submodules.experts = ModuleSpec(TEGroupedMLP, submodules=MLPSubmodules(linear_fc1=ColumnGrouped, linear_fc2=RowGrouped))
        else:
            layer.submodules.pre_mlp_layernorm = IdentityOp
            mlp.submodules.linear_fc1 = TELayerNormColumnParallelLinear
    return block


local_spec = layers.spec
layers.spec = spec
layers.switches = lambda *_: ON


def main(folder: str, *layouts: str) -> dict[str, Any]:
    found: dict[str, Any] = {layout: {} for layout in layouts}
    for layout in layouts:
        sizes = {"ranks": dist.get_world_size(), **case.settings_of(layout)}
        place = mesh.start(case.config(Path(folder), **sizes).trainer, SEED)
        for name in ("per-expert", "shared-outer", "tied"):
            path = Path(folder) / lora_case.ADAPTERS[name][0]
            for recompute in ("none", "full"):
                job = adapter_job(path, case.config(path, **sizes, pack=True, recompute=recompute), place, name)
                found[layout][f"{name} {recompute}"] = parity.worst(forward_and_gradients(job))
        refused(job)
        leave()
    return found


def refused(job: Job) -> None:
    """A layer or experts of an unknown class."""
    hf = load_hf_config(job.path / "hf")
    for change, said in (
        (
            lambda layer: setattr(layer.self_attention, "linear_qkv", torch.nn.Linear(1, 1)),
            "a linear_qkv that is a Linear, expected one of",
        ),
        (lambda layer: setattr(layer.mlp, "experts", torch.nn.Linear(1, 1)), "experts that are a Linear, expected SequentialMLP or"),
    ):

        def attach_to_changed(chunks: Any, *rest: Any, change: Any = change, inner: Any = attach.attach) -> None:
            change(chunks[0].decoder.layers[0])
            inner(chunks, *rest)

        with mock.patch.object(attach, "attach", attach_to_changed), pytest.raises(ConfigError, match=said):
            gpt.build(hf, job.config, job.mesh)


if __name__ == "__main__":
    group.run(main)
