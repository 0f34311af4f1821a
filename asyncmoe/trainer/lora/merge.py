"""Merges adapters into the weights: W + (alpha / rank) B A; each rank merges its own part.

A half is divided like its layer (`asyncmoe.models.lora.halves`), so a rank's part of B A belongs to its part of W.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from asyncmoe.models.lora.halves import LINEARS
from asyncmoe.platform import collectives
from asyncmoe.trainer.lora.attach import adapters_of
from asyncmoe.trainer.lora.pairs import ExpertPairs, Pairs


@torch.no_grad()
def merge(chunks: Sequence[torch.nn.Module]) -> float:
    """Add the adapters to the weights, and switch them off. Only reloading the weights undoes this. Collective over all ranks.

    Returns:
        The share of the adapters that the dtype of the weights loses: |rounding| / |B A| over all weights (Frobenius norm). 1: all of it.
    """
    lost = added = 0.0
    for chunk, adapters in zip(chunks, adapters_of(chunks), strict=True):
        decoder: Any = chunk.decoder
        for layer, linears in zip(decoder.layers, adapters.layers(), strict=True):
            for name, pairs in linears.items():
                assert isinstance(pairs, Pairs)
                for weight, delta in zip(_weights(layer, name, pairs), pairs.deltas(), strict=True):
                    exact = weight.float() + delta.float()
                    weight.copy_(exact)
                    lost += float((weight.float() - exact).square().sum())
                    added += float(delta.float().square().sum())
        adapters.on = False
    lost, added = collectives.total(torch.tensor([lost, added])).tolist()
    return float((lost / (added or 1.0)) ** 0.5)


def _weights(layer: Any, name: str, pairs: Pairs) -> Iterator[torch.Tensor]:
    """Yield the weight of a Megatron linear layer; for experts, the weight of each of the rank's experts in order."""
    if not isinstance(pairs, ExpertPairs):
        yield layer.get_submodule(LINEARS[name]).weight
    elif hasattr(layer.mlp.experts, "local_experts"):
        yield from (getattr(expert, name).weight for expert in layer.mlp.experts.local_experts)
    else:
        grouped = getattr(layer.mlp.experts, name)
        yield from (getattr(grouped, f"weight{at}") for at in range(len(pairs.each())))
