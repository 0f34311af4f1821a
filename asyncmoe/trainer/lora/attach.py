"""Attaching adapters to GPTModels, and switching them off.

The adapters are an additional submodule of each model chunk, `adapters`; the adapted layers get hooks. The model's own parameters
therefore keep their names, data parallelism and the optimizer find the new parameters by themselves, and recomputed layers run the hooks
again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from asyncmoe.config.lora import LoraSection
from asyncmoe.models.lora import halves as planned
from asyncmoe.models.lora.adapter import Kind, kind_of
from asyncmoe.models.lora.halves import PREFIX, Half
from asyncmoe.models.megatron import chunk_prefix
from asyncmoe.models.parallel import MegatronParallel
from asyncmoe.models.shape import Shape
from asyncmoe.platform import megatron
from asyncmoe.trainer.lora import hooks
from asyncmoe.trainer.lora.module import Adapters
from asyncmoe.trainer.lora.pairs import DensePairs, ExpertPairs, Pairs

megatron.prepare()

from megatron.core import parallel_state as groups  # noqa: E402  only after the platform is prepared


def attach(
    chunks: Sequence[torch.nn.Module], config: Any, m: Shape, section: LoraSection, parallel: MegatronParallel, rank: int, seed: int
) -> None:
    """Attach adapters to the chunks of a rank and freeze all other parameters. Call it before data parallelism wraps the chunks.

    Args:
        chunks: bare GPTModels.
        config: their TransformerConfig; its `finalize_model_grads_func` is extended.
        seed: seed of the initial values.

    Raises:
        ConfigError: the model does not support this adapter, or a layer's class does not support adapters.
    """
    kind = kind_of(section, m)
    planned.check(kind, m)
    made: list[Adapters] = []
    for chunk, layers in zip(chunks, parallel.chunk_layers(m.layers, rank), strict=True):
        chunk.requires_grad_(False)
        adapters = Adapters([_layer_pairs(m, kind, parallel, rank, layer, seed) for layer in layers])
        adapters.to(device=next(chunk.parameters()).device, dtype=config.params_dtype)
        for _, _, half, parameter in adapters.halves():
            _mark(parameter, half)
        decoder: Any = chunk.decoder
        for layer, linears in zip(decoder.layers, adapters.layers(), strict=True):
            hooks.hook_layer(layer, linears, adapters)
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(hooks.start_of_graph)  # type: ignore[union-attr]
        if chunk.post_process:
            chunk.output_layer.register_forward_hook(hooks.end_of_graph)  # type: ignore[union-attr]
        chunk.add_module("adapters", adapters)
        made.append(adapters)

    copies: list[Any] = [parameter for adapters in made for _, _, half, parameter in adapters.halves() if half.partial == "etp"]
    reduce = config.finalize_model_grads_func

    def finalize(model: list[Any], *arguments: Any, **keywords: Any) -> None:
        reduce(model, *arguments, **keywords)
        _sum_over_expert_tensor_ranks([parameter.main_grad for parameter in copies])

    config.finalize_model_grads_func = finalize


def adapters_of(chunks: Sequence[torch.nn.Module]) -> list[Adapters]:
    """Return the adapters of a rank's chunks, to which they were attached."""
    found: list[Any] = [chunk.adapters for chunk in chunks]
    return found


def parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Return a rank's halves by the names of `asyncmoe.models.lora.halves.rank_layout`."""
    return {
        chunk_prefix(number, len(chunks)) + PREFIX + name: parameter
        for number, adapters in enumerate(adapters_of(chunks))
        for name, parameter in adapters.named_parameters()
    }


@contextmanager
def switched_off(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Run forward passes as the base model, i.e. the reference policy, without a second copy of the weights."""
    switches = [(one, one.on) for one in adapters_of(chunks)]
    for one, _ in switches:
        one.on = False
    try:
        yield
    finally:
        for one, on in switches:
            one.on = on


def _layer_pairs(m: Shape, kind: Kind, parallel: MegatronParallel, rank: int, layer: int, seed: int) -> dict[str, Pairs]:
    dense = layer in m.dense_layers
    by_linear: dict[str, list[Half]] = {}
    for half in planned.layer_halves(m, kind, parallel, rank, dense):
        by_linear.setdefault(half.linear, []).append(half)
    made: dict[str, Pairs] = {}
    for linear, halves in by_linear.items():
        query_groups, rows = 1, next(half.box.extent[0] for half in halves if half.side == "b")
        if linear == "linear_qkv":
            query_groups = m.kv_heads // parallel.tp
            key = query_groups * m.head_dim
            outputs = {"q_proj": key * m.heads_per_group, "k_proj": key, "v_proj": key}
        else:
            outputs = dict.fromkeys(("gate_proj", "up_proj") if linear.endswith("fc1") else (halves[0].projection,), rows)
        of_experts = linear in ("linear_fc1", "linear_fc2") and not dense
        made[linear] = (ExpertPairs if of_experts else DensePairs)(halves, outputs, query_groups, layer, kind.scale, seed)
    return made


def _mark(parameter: torch.nn.Parameter, half: Half) -> None:
    """Set the attributes that tell Megatron how to treat the gradient of a half: `allreduce` (False: expert data parallelism applies),
    `sequence_parallel` (`finalize_model_grads` sums the gradients of copies over tensor-parallel ranks), `tensor_model_parallel` and
    `shared` (whether a rank's part counts in the global gradient norm)."""
    marks = {
        "allreduce": not half.expert_data,
        "sequence_parallel": half.partial == "tp",
        "tensor_model_parallel": half.counted,
        "partition_dim": -1 if half.axis is None else half.axis + (half.experts is not None),
        "partition_stride": 1,
        # By default Megatron counts undivided parameters on the first tensor-parallel rank, but copies of experts' halves lie on other
        # ranks.
        "shared": not half.counted,
    }
    for name, value in marks.items():
        setattr(parameter, name, value)


def _sum_over_expert_tensor_ranks(gradients: Sequence[torch.Tensor]) -> None:
    """Sum, in place, the gradients of a rank's parameters whose `Half.partial` is "etp", after Megatron's `finalize_model_grads_func`.

    By then gradients are already summed over data-parallel ranks, perhaps during the backward pass; if the optimizer state is sharded,
    each rank has the sums of its own shard only. All ranks that hold copies of a half have the same shard of its gradient, so adding their
    sums gives the right gradient for every element of that shard.
    """
    group: dist.ProcessGroup = groups.get_expert_tensor_parallel_group()
    if group.size() == 1 or not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
