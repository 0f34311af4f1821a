"""Hooks in Megatron's layers that feed a linear layer's input to its pairs and add their output to the layer's output.

Layers are recognised by class: Megatron's own, and its wrappers of Transformer Engine's, which are divided over ranks in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from asyncmoe.errors import ConfigError, an
from asyncmoe.models.lora.halves import LINEARS
from asyncmoe.platform import megatron
from asyncmoe.trainer.lora.module import Adapters
from asyncmoe.trainer.lora.pairs import DensePairs, ExpertPair, ExpertPairs

megatron.prepare()

from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP  # noqa: E402

from asyncmoe.platform.megatron.grouped_experts import GroupedExperts, plain  # noqa: E402

_PLAIN = {"ColumnParallelLinear", "RowParallelLinear", "ReplicatedLinear", "TEColumnParallelLinear", "TERowParallelLinear", "TELinear"}
_NORMED = {"TELayerNormColumnParallelLinear"}
"""Classes that include the preceding norm: their weight multiplies the normalised input."""


def hook_layer(layer: Any, linears: torch.nn.ModuleDict, adapters: Adapters) -> None:
    """Add pairs, by the names of their linear layers, to a Megatron transformer layer.

    Raises:
        ConfigError: a layer's class is unknown.
    """
    for name, pairs in linears.items():
        if isinstance(pairs, ExpertPairs):
            _hook_experts(layer.mlp.experts, name, pairs, adapters)
        elif isinstance(pairs, DensePairs):
            linear = layer.get_submodule(LINEARS[name])
            linear.register_forward_hook(_adding(linear, name, pairs, adapters))


def start_of_graph(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
    """Embedding hook: make the output require gradients, as a frozen embedding's does not, so that recomputed layers get gradients.

    The output [S, B, H] also gets standard strides: it is transposed, and with the unusual strides that a batch of one has, torch would
    multiply each row by its own copy of a frozen weight.
    """
    output = plain(output)
    return output.requires_grad_() if torch.is_grad_enabled() else output


def end_of_graph(module: torch.nn.Module, arguments: Any, output: Any) -> None:
    """Output-layer hook: give the gradient of the transposed logits [S, 1, V] standard strides; see `start_of_graph`."""
    if output[0].requires_grad:
        output[0].register_hook(plain)


def _adding(linear: torch.nn.Module, name: str, pairs: DensePairs, adapters: Adapters) -> Any:
    multiplied = _input_of(linear, name)

    def hook(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        return (pairs.add(multiplied(arguments[0]), output[0]), output[1]) if adapters.on else None

    return hook


def _hook_experts(experts: Any, name: str, pairs: ExpertPairs, adapters: Adapters) -> None:
    if isinstance(experts, GroupedExperts):
        experts.added[name] = lambda x, y, ends: pairs.add_to_all(x, y, ends) if adapters.on else y
    elif isinstance(experts, SequentialMLP):
        _hook_each_expert(experts, name, pairs, adapters)
    elif isinstance(experts, TEGroupedMLP):
        getattr(experts, name).register_forward_hook(_adding_grouped(pairs, adapters))
    else:
        raise ConfigError(
            "lora.targets",
            got=f"experts that are {an(type(experts).__name__)}",
            expected="SequentialMLP or TEGroupedMLP",
            hint="remove gate_proj, up_proj and down_proj from lora.targets",
        )


def _adding_grouped(pairs: ExpertPairs, adapters: Adapters) -> Any:
    """Hook of a linear layer of all experts; its input is the rows, sorted by expert, and each expert's row count."""

    def hook(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        if not adapters.on:
            return None
        (x, counts), (y, bias) = arguments, output
        rows = zip(pairs.each(), torch.split(x, list(counts)), torch.split(y, list(counts)), strict=True)
        return torch.cat([pair.add(given, made) for pair, given, made in rows]), bias

    return hook


def _hook_each_expert(experts: Any, name: str, pairs: ExpertPairs, adapters: Adapters) -> None:
    """Split the pairs of all experts once per forward pass, before the first expert, and release them after the last."""
    current: list[ExpertPair] = []

    def begin(module: torch.nn.Module, arguments: Any) -> None:
        if adapters.on:
            current[:] = pairs.each()

    def end(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        current.clear()

    def adding(at: int) -> Any:
        return lambda module, arguments, output: (current[at].add(arguments[0], output[0]), output[1]) if adapters.on else None

    experts.register_forward_pre_hook(begin)
    experts.register_forward_hook(end, always_call=True)
    for at, expert in enumerate(experts.local_experts):
        linear = getattr(expert, name)
        _input_of(linear, name)
        linear.register_forward_hook(adding(at))


def _input_of(linear: Any, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from the layer's input to the operand of its weight; both [S, B, H], a rank's own rows under sequence
    parallelism."""
    classes = {one.__name__ for one in type(linear).__mro__}
    if classes & _NORMED:
        return lambda x: F.rms_norm(x, (x.shape[-1],), linear.layer_norm_weight, linear.eps)
    if classes & _PLAIN:
        return lambda x: x
    raise ConfigError(
        "lora.targets",
        got=f"a {name} that is {an(type(linear).__name__)}",
        expected=f"one of {', '.join(sorted(_PLAIN | _NORMED))}",
        hint="remove its projections from lora.targets",
    )
