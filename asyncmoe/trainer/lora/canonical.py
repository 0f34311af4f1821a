"""Distributes the adapter's whole tensors over the ranks; `asyncmoe.weights.sender.gather` gathers them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from asyncmoe.models import shape_of
from asyncmoe.models.lora import peft
from asyncmoe.trainer.lora import attach
from asyncmoe.trainer.lora.values import cut
from asyncmoe.trainer.model.gpt import Model


def write(model: Model, halves: Mapping[str, torch.Tensor]) -> None:
    """Fill this rank's halves from all whole halves, by canonical name, of any floating-point dtype. Call it before the optimizer is built:
    with bfloat16 the optimizer copies the halves into float32 masters."""
    for adapters in attach.adapters_of(model.chunks):
        for _, layer, half, parameter in adapters.halves():
            parameter.data.copy_(cut(half, layer, halves.__getitem__))


def start_from(model: Model, adapter: Path, base: Path) -> None:
    """Fill this rank's halves from an adapter saved by PEFT.

    Args:
        base: the base model of this run.

    Raises:
        DataError, UserError: see `asyncmoe.models.lora.peft.start_from`.
    """
    assert model.adapter is not None
    kind = model.adapter
    found = peft.start_from(adapter, shape_of(model.hf), kind, str(base))
    stored = getattr(torch, found.dtype)
    write(model, {name: torch.from_numpy(np.ascontiguousarray(value)).view(stored) for name, value in found.values.items()})
