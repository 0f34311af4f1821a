"""Which elements of a model's weights differ from a checkpoint's, which may have been saved under another layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from asyncmoe.flight.stage import TensorDifference
from asyncmoe.platform import collectives, megatron
from asyncmoe.trainer.model import checkpoint as state
from asyncmoe.trainer.model.gpt import Model, gather_weights

megatron.prepare()

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace  # noqa: E402

from asyncmoe.platform.megatron import canonical  # noqa: E402
from asyncmoe.platform.megatron.state_boxes import is_tensor  # noqa: E402


def differences(checkpoint: Path, model: Model) -> list[TensorDifference]:
    """Compare a model's weights bit by bit with a checkpoint's, in the order of the forward pass; [] if they are equal. Collective over all
    ranks, with the same result on each. The model does not change.

    Raises:
        DataError: see `checkpoint.read`.
    """
    gather_weights(model)
    described = state.sharded_state(model, None, loading=True)
    placed = canonical.placed(described)
    names = canonical.names_of(placed)
    numbers = {name: number for number, name in enumerate(names)}
    counts, extremes = np.zeros(len(names)), np.full((4, len(names)), -np.inf)
    for one, saved in zip(placed, _saved(checkpoint, described), strict=True):
        ours, theirs, place = one.data.detach().view(-1), saved.to(one.data.device).view(-1), numbers[one.name]
        differ = (ours.view(torch.uint8) != theirs.view(torch.uint8)).view(-1, ours.element_size()).any(1)
        extremes[3, place] = max(extremes[3, place], _largest(theirs))
        if any(one.replica) or not differ.any():
            continue
        counts[place] += int(differ.sum())
        extremes[2, place] = max(extremes[2, place], _largest(ours[differ].double() - theirs[differ].double()))
        for first, rows, count, index, step in one.boxes.tolist():
            if len(found := differ[first : first + rows * count].nonzero()):
                low, high = (index + at // count * step + at % count for at in (int(found[0]), int(found[-1])))
                extremes[:2, place] = np.maximum(extremes[:2, place], (-low, high))
    counts = collectives.total(torch.from_numpy(counts)).cpu().numpy()
    first, last, largest, magnitude = collectives.total(torch.from_numpy(extremes), dist.ReduceOp.MAX).cpu().numpy()
    return [
        TensorDifference(name, int(counts[i]), int(-first[i]), int(last[i]), float(largest[i]), float(magnitude[i]))
        for i, name in enumerate(names)
        if counts[i]
    ]


def _saved(checkpoint: Path, described: Mapping[str, Mapping[str, Any]]) -> list[torch.Tensor]:
    """Return the checkpoint's values, in host memory of their own, of the tensors in a description of a model's state, in its order."""

    def fresh(value: Any) -> Any:
        return replace(value, data=torch.empty_like(value.data, device="cpu", requires_grad=False)) if is_tensor(value) else value

    found, _ = state.read(checkpoint, dict_list_map_outplace(fresh, described), None)
    return [found[chunk][key] for chunk, values in described.items() for key, value in values.items() if is_tensor(value)]


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max().nan_to_num(nan=math.inf, posinf=math.inf)) if values.numel() else 0.0
