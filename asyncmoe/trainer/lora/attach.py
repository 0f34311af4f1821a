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

from asyncmoe.config.lora import LoraSection
from asyncmoe.errors import InvariantBroken
from asyncmoe.models.lora import halves as planned
from asyncmoe.models.lora.adapter import Kind, kind_of
from asyncmoe.models.lora.halves import PREFIX, Half
from asyncmoe.models.megatron import chunk_prefix
from asyncmoe.models.parallel import MegatronParallel
from asyncmoe.models.shape import Shape
from asyncmoe.trainer.lora import gradients, hooks
from asyncmoe.trainer.lora.module import Adapters
from asyncmoe.trainer.lora.pairs import DensePairs, ExpertPairs, Pairs, gate_up, qkv, single


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
    if parallel.tp > 1 and not config.sequence_parallel:
        raise InvariantBroken("adapters: tensor parallelism without sequence parallelism")
    made: list[Adapters] = []
    for chunk, layers in zip(chunks, parallel.chunk_layers(m.layers, rank), strict=True):
        chunk.requires_grad_(False)
        adapters = Adapters([_layer_pairs(m, kind, parallel, rank, layer, seed) for layer in layers])
        adapters.to(device=next(chunk.parameters()).device, dtype=config.params_dtype)
        for _, _, half, parameter in adapters.halves():
            gradients.mark(parameter, half)
        decoder: Any = chunk.decoder
        for layer, linears in zip(decoder.layers, adapters.layers(), strict=True):
            hooks.hook_layer(layer, linears, adapters)
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(hooks.start_of_graph)  # type: ignore[union-attr]
        if chunk.post_process:
            chunk.output_layer.register_forward_hook(hooks.end_of_graph)  # type: ignore[union-attr]
        chunk.add_module("adapters", adapters)
        made.append(adapters)

    def copies() -> Iterator[torch.nn.Parameter]:
        yield from (parameter for adapters in made for _, _, half, parameter in adapters.halves() if half.partial == "etp")

    config.finalize_model_grads_func = gradients.finalizing(config.finalize_model_grads_func, copies)


def adapters_of(chunks: Sequence[torch.nn.Module]) -> list[Adapters]:
    """Return the adapters of a rank's chunks.

    Raises:
        InvariantBroken: a chunk has no adapters.
    """
    found = [getattr(chunk, "adapters", None) for chunk in chunks]
    if not all(isinstance(one, Adapters) for one in found):
        raise InvariantBroken("the model has no adapters")
    return [one for one in found if isinstance(one, Adapters)]


def parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Return a rank's halves by the names of `asyncmoe.models.lora.megatron.rank_layout`."""
    return {
        chunk_prefix(number, len(chunks)) + PREFIX + name: parameter
        for number, adapters in enumerate(adapters_of(chunks))
        for name, parameter in adapters.named_parameters()
    }


def values(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return the tensors of `parameters`, not copies."""
    return {name: parameter.data for name, parameter in parameters(chunks).items()}


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
        rows = next(half.part[0] for half in halves if half.side == "b")
        if linear == "linear_qkv":
            fused = qkv(m.kv_heads // parallel.tp, m.heads_per_group, m.head_dim)
        else:
            fused = gate_up(rows) if linear.endswith("fc1") else single(halves[0].projection, rows)
        of_experts = linear in ("linear_fc1", "linear_fc2") and not dense
        made[linear] = (ExpertPairs if of_experts else DensePairs)(halves, fused, layer, kind.scale, seed)
    return made
