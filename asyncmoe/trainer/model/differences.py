"""Which elements of a model's weights differ from a checkpoint's, which may have been saved under another layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from asyncmoe.platform import collectives, megatron
from asyncmoe.trainer.model import checkpoint as state
from asyncmoe.trainer.model.gpt import Model, gather_weights

megatron.prepare()

from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory  # noqa: E402

from asyncmoe.platform.megatron import canonical  # noqa: E402

_NONE = np.iinfo(np.int64).max
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorDifference:
    """How a canonical tensor differs.

    Attributes:
        name: as in `StateDigests.tensors`.
        elements: number of elements whose bits differ.
        first, last: row-major index of the first and of the last of these.
        largest: largest absolute difference; infinite if it is not a number.
        magnitude: largest magnitude in the checkpoint's tensor.
    """

    name: str
    elements: int
    first: int
    last: int
    largest: float
    magnitude: float


def differences(checkpoint: Path, model: Model) -> list[TensorDifference]:
    """Compare a model's weights bit by bit with a checkpoint's, in the order of the forward pass; [] if they are equal. Collective over all
    ranks, with the same result on each. The model does not change.

    Raises:
        DataError: see `checkpoint.read`.
    """
    gather_weights(model)
    described = state.sharded_state(model, None, loading=True)
    placed = canonical.placed(described)
    everyones = collectives.everyones([one.name for one in placed])
    names = canonical.in_forward_order(name for each in everyones for name in each)
    numbers = {name: number for number, name in enumerate(names)}
    counts, edges, sizes = np.zeros(len(names), np.int64), np.full((2, len(names)), -_NONE), np.zeros((2, len(names)))
    for one, saved in zip(placed, _saved(checkpoint, described), strict=True):
        place = numbers[one.name]
        ours, theirs = one.data.detach().view(-1), saved.view(-1)
        sizes[1, place] = max(sizes[1, place], _largest(theirs))
        differ = ours.view(_BITS[ours.element_size()]) != theirs.view(_BITS[ours.element_size()])
        if any(one.replica) or not differ.any():
            continue
        counts[place] += int(differ.sum())
        sizes[0, place] = max(sizes[0, place], _largest(ours[differ].double() - theirs[differ].double()))
        for first, rows, count, index, step in one.boxes.tolist():
            if len(found := differ[first : first + rows * count].nonzero()):
                low, high = (index + at // count * step + at % count for at in (int(found[0]), int(found[-1])))
                edges[:, place] = np.maximum(edges[:, place], (-low, high))
    total, largest = collectives.total, dist.ReduceOp.MAX
    counts = total(torch.from_numpy(counts)).cpu().numpy()
    edges, sizes = (total(torch.from_numpy(values), largest).cpu().numpy() for values in (edges, sizes))
    return [
        TensorDifference(name, int(counts[i]), int(-edges[0, i]), int(edges[1, i]), float(sizes[0, i]), float(sizes[1, i]))
        for i, name in enumerate(names)
        if counts[i]
    ]


def _saved(checkpoint: Path, described: Mapping[str, Mapping[str, Any]]) -> list[torch.Tensor]:
    """Return the checkpoint's values, in memory of their own, of the tensors in a description of a model's state, in its order."""
    tensors = (ShardedTensor, ShardedTensorFactory)
    fresh = {
        chunk: {
            key: replace(value, data=torch.empty_like(value.data, requires_grad=False)) if isinstance(value, tensors) else value
            for key, value in values.items()
        }
        for chunk, values in described.items()
    }
    found, _ = state.read(checkpoint, fresh, None)
    return [found[chunk][key] for chunk, values in described.items() for key, value in values.items() if isinstance(value, tensors)]


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max().nan_to_num(nan=math.inf, posinf=math.inf)) if values.numel() else 0.0
