"""Values of an adapter on a rank: the initial ones, the same under every layout, and parts of whole halves."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch

from asyncmoe.models.lora.halves import Half


def initial(half: Half, layer: int, seed: int) -> torch.Tensor:
    """Return the initial value of a half: float32 of `half.shape`. B is 0, so the policy starts as the base model; A is uniform within
    +-1 / sqrt(in), drawn with a separate generator for each canonical half and then sliced.

    Source: PEFT's `LoraLayer.reset_lora_parameters` (kaiming_uniform_ with a = sqrt(5)).
    """
    if half.side == "b":
        return torch.zeros(half.shape)
    return cut(half, layer, lambda name: _draw(half.whole, name, seed))


def cut(half: Half, layer: int, whole: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Return a rank's part of the unsharded halves of a parameter: `half.shape`. `whole` returns a half by its canonical name."""
    box = tuple(slice(start, start + extent) for start, extent in zip(half.box.start, half.box.extent, strict=True))
    parts = [whole(f"layers.{layer}.{name}")[box] for name in half.canonical]
    return torch.stack(parts) if half.experts is not None else parts[0].clone()


def _draw(whole: tuple[int, int], name: str, seed: int) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1 / math.sqrt(whole[1])
    return torch.empty(whole).uniform_(-bound, bound, generator=generator)
