"""Adapters with random values, and models with them merged into their weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asyncmoe.config.lora import ATTENTION, GROUPED, MLP
from asyncmoe.models.attention import Grouped
from asyncmoe.models.latent import Latent
from asyncmoe.models.lora.adapter import DTYPES, Adapter, Kind, halves
from asyncmoe.models.shape import Attention, Shape
from asyncmoe.reshard.layout import PADDING, RankLayout

ALL = GROUPED + MLP
"""Targets of models of grouped-query attention."""
LATENT = Latent(q_rank=6, kv_rank=5, nope=3, rope=2, value=4)


def shape(
    layers: int = 2,
    experts: int = 4,
    hidden: int = 8,
    width: int = 6,
    dense: frozenset[int] = frozenset(),
    shared: int = 0,
    attention: Attention | None = None,
) -> Shape:
    heads = {"heads": 4, "kv_heads": 2, "head_dim": 4, "vocab": 32, "tied": False}
    return Shape(
        layers=layers,
        hidden=hidden,
        dense_width=10,
        experts=experts,
        expert_width=width if experts else 0,
        experts_per_token=2 if experts else 0,
        dense_layers=dense if experts else frozenset(range(layers)),
        attention=attention or Grouped(),
        shared_width=shared if experts else 0,
        **heads,
    )


def random_adapter(m: Shape, kind: Kind, seed: int, dtype: str = "float32", scale: float = 0.1) -> Adapter:
    draw = np.random.default_rng(seed)
    values = {name: (scale * draw.standard_normal(size)).astype(np.float32) for name, size in halves(m, kind).items()}
    if dtype == "bfloat16":
        values = {name: (value.view(np.uint32) >> 16).astype(np.uint16) for name, value in values.items()}
    return Adapter(kind, dtype, {name: np.ascontiguousarray(value.astype(DTYPES[dtype])) for name, value in values.items()})


def half(adapter: Adapter, layer: int, expert: int | None, target: str, side: str, place: str = "") -> np.ndarray:
    """By its canonical name, or that of the shared half where there is one.

    Args:
        place: "shared": of what all tokens pass beside their experts.
    """
    front = f"layers.{layer}." + (f"{place}." if place else "")
    names = [f"{front}{target}"] if expert is None else [f"{front}experts.{expert}.{target}", f"{front}experts.shared.{target}"]
    (found,) = [adapter.values[f"{name}.{side}"] for name in names if f"{name}.{side}" in adapter.values]
    return found


def copied(layout: RankLayout, adapter: Adapter, fill: float = 0.0) -> dict[str, np.ndarray]:
    """The storages of a layout, filled from an adapter piece by piece; padding is zero, the rest is `fill`."""
    found = {name: np.full(storage.size, fill, np.float32) for name, storage in layout.storages.items()}
    for piece in layout.pieces:
        box = tuple(slice(start, start + extent) for start, extent in zip(piece.box.start, piece.box.extent, strict=True))
        value = np.zeros(piece.box.extent, np.float32) if piece.tensor == PADDING else adapter.values[piece.tensor][box]
        strides = tuple(4 * stride for stride in piece.strides)
        np.lib.stride_tricks.as_strided(found[piece.storage][piece.offset :], piece.box.extent, strides)[...] = value
    return {name: found[name].reshape(storage.shape) for name, storage in layout.storages.items()}


def merge(model: Any, m: Shape, adapter: Adapter) -> Any:
    """Add the adapter to the weights of a transformers model, in place."""
    import torch

    parameters: Mapping[str, Any] = dict(model.named_parameters())

    def delta(layer: int, expert: int | None, target: str, place: str = "") -> torch.Tensor:
        a, b = (torch.from_numpy(np.array(half(adapter, layer, expert, target, side, place))).double() for side in "ab")
        return (adapter.kind.alpha / adapter.kind.rank * (b @ a)).float()

    def add_to_experts(front: str, layer: int, target: str) -> None:
        for expert in range(m.experts):
            if target == "down_proj":
                parameters[f"{front}mlp.experts.down_proj"][expert] += delta(layer, expert, target)
            else:
                first = 0 if target == "gate_proj" else m.expert_width
                parameters[f"{front}mlp.experts.gate_up_proj"][expert, first : first + m.expert_width] += delta(layer, expert, target)

    with torch.no_grad():
        for layer in range(m.layers):
            front = f"model.layers.{layer}."
            for target in adapter.kind.targets:
                if target in ATTENTION:
                    parameters[f"{front}self_attn.{target}.weight"] += delta(layer, None, target)
                elif layer in m.dense_layers:
                    parameters[f"{front}mlp.{target}.weight"] += delta(layer, None, target)
                else:
                    add_to_experts(front, layer, target)
                    if m.shared_width:
                        parameters[f"{front}mlp.shared_experts.{target}.weight"] += delta(layer, None, target, "shared")
    return model


def load(path: Path) -> Any:
    """The transformers model at `path`, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
