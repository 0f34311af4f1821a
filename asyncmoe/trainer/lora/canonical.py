"""Distributes the adapter's whole tensors over the ranks; `asyncmoe.weights.sender.gather` gathers them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from asyncmoe.models import shape_of
from asyncmoe.models.lora import peft
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.models.lora.adapter import halves as halves_of
from asyncmoe.models.lora.halves import canonical_layout, rank_layout
from asyncmoe.models.parallel import MegatronParallel
from asyncmoe.models.shape import Shape
from asyncmoe.reshard import LocalTransport, exchange
from asyncmoe.reshard import plan as plan_of
from asyncmoe.trainer.model.gpt import Model


def write(model: Model, halves: Mapping[str, torch.Tensor]) -> None:
    """Fill this rank's halves from whole halves, as cut by `local`. Call it before the optimizer is built: with bfloat16 the optimizer
    copies the halves into float32 masters."""
    assert model.adapter is not None
    mine, shape = model.adapter_values(), shape_of(model.hf)
    for name, value in local(shape, model.adapter, model.parallel, model.mesh.rank, halves, model.dtype).items():
        mine[name].copy_(value)


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


def local(
    m: Shape, kind: Kind, parallel: MegatronParallel, rank: int, halves: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return a rank's part of whole halves, by parameter name, on the host.

    Args:
        halves: all halves of the adapter, by canonical name, on the host; of any floating-point dtype.
    """
    wanted, name = halves_of(m, kind), str(dtype).removeprefix("torch.")
    here = rank_layout(m, kind, parallel, rank, name).at(0)
    steps = plan_of(wanted, [canonical_layout(m, kind, name)], [here])
    arrays = {source: halves[source].detach().to(dtype).contiguous() for source in steps.sources.get(0, {})}
    made = {target: torch.empty(storage.shape, dtype=dtype) for target, storage in here.storages.items()}
    exchange(steps, LocalTransport(), arrays, made)
    return made
