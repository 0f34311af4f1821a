"""Where a rank's parameters, and its parts of their gradients and optimizer states, are in the tensors of the whole model.

Megatron describes this for checkpoints (dist_checkpointing/mapping.py, 0.16.1 and 0.19.2). A canonical tensor has a name and a shape that
do not depend on the layout. All experts of a layer form one tensor. Where Megatron stacks layers, each layer is a tensor of its own.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from asyncmoe.errors import InvariantBroken
from asyncmoe.platform import collectives
from asyncmoe.platform.megatron.any_layout import optimizers
from asyncmoe.platform.megatron.patch import module
from asyncmoe.platform.megatron.state_boxes import boxes, contiguous, is_tensor, own_ranges, parts

_STACKED = re.compile(r"\blayers\.(?!\d)")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, eq=False)
class Placed:
    """A saved parameter or buffer of this rank.

    Attributes:
        name: of its canonical tensor.
        data: the parameter or buffer itself.
        boxes: int64[n, 5], a row for each box: flat index of its first element in `data`, rows, elements per row, the first element's index
            in the canonical tensor, distance of rows there. A box's rows follow each other in `data`.
        replica: Megatron's `replica_id`; its last number is the rank among those of data parallelism. One of several replicas is all 0.
    """

    name: str
    data: torch.Tensor
    boxes: np.ndarray
    replica: tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Held:
    """A rank's part of the gradient and optimizer state of a parameter.

    Attributes:
        parameter: the parameter, whose `main_grad` is its gradient in the buffers of Megatron's data parallelism.
        own: range in the flat parameter; only this part of the gradient is reduced on this rank.
        states: returns the part's states by Megatron's name: "param" (the master), and after the first step "exp_avg" and "exp_avg_sq".
    """

    parameter: Any
    own: range
    states: Callable[[], Mapping[str, torch.Tensor]]


def placed(state: Any) -> list[Placed]:
    """Return the tensors in a description of the model's state (`sharded_state_dict`), in its order."""
    return [_placed(value) for value in module("dist_checkpointing.dict_utils").nested_values(state) if is_tensor(value)]


def _placed(described: Any) -> Placed:
    name, rows = "", []
    for part in parts(described, described.data.dtype):
        name, shape, offset = part.key, part.global_shape, part.global_offset
        if _STACKED.search(name):
            name, shape, offset = _STACKED.sub(f"layers.{offset[0]}.", name), shape[1:], offset[1:]
        for corner, view in contiguous(part.data):
            inside, sizes = ((fill,) * (len(shape) - len(some)) + tuple(some) for fill, some in ((0, corner), (1, view.shape)))
            rows.append(_box(shape, [a + b for a, b in zip(offset, inside, strict=True)], sizes, int(view.storage_offset())))
    return Placed(name, described.data, np.array(rows, np.int64), described.replica_id)


def _box(shape: Sequence[int], offset: Sequence[int], sizes: Sequence[int], first: int) -> tuple[int, ...]:
    """Return the row of `Placed.boxes` for a box of a canonical tensor that begins at `first` in memory and is contiguous there."""
    levels, stride, index = [(1, 1)], 1, 0  # (number, distance) of what follows at equal distances, from the innermost
    for axis in reversed(range(len(shape))):
        number, distance = levels[-1]
        if number * distance == stride:
            levels[-1] = number * sizes[axis], distance
        elif sizes[axis] > 1:
            levels.append((sizes[axis], stride))
        index += offset[axis] * stride
        stride *= shape[axis]
    if len(levels) > 2:
        raise InvariantBroken(f"a parameter of shape {list(sizes)} is cut along more than one inner axis of {list(shape)}")
    (count, _), (rows, step) = (*levels, (1, 0))[:2]
    return first, rows, count, index, step


def clipped(table: np.ndarray, own: range) -> np.ndarray:
    """Return the parts of boxes (`Placed.boxes`) that are in a range of the flat parameter, in the same form."""
    found = []
    for first, rows, count, index, step in table.tolist():
        for box in boxes((rows, count), max(own.start - first, 0), min(own.stop - first, rows * count)):
            row, column = box.offset
            found.append((first + box.begin, *box.sizes, index + row * step + column, step))
    return np.array(found, np.int64).reshape(-1, 5)


def held(optimizer: Any, parameters: Iterable[torch.nn.Parameter]) -> Iterator[Held]:
    """Yield this rank's parts of the trained parameters, which are whole unless the optimizer is distributed.

    Args:
        optimizer: Megatron's optimizer, chained or not.
        parameters: this rank's trained parameters.
    """
    members = [one for one in optimizers(optimizer) if one.optimizer is not None]
    if any(hasattr(one, "gbuf_ranges") for one in members):
        for one in members:
            for parameter, own in own_ranges(one):
                yield Held(parameter, own, partial(_own_states, one, parameter))
        return
    of_main = {main: one.optimizer for one in members for group in one.optimizer.param_groups for main in group["params"]}
    for parameter in parameters:
        main = getattr(parameter, "main_param", parameter)
        yield Held(parameter, range(parameter.numel()), partial(_states, of_main[main], main))


def _own_states(member: Any, parameter: Any) -> Mapping[str, torch.Tensor]:
    if member.config.use_precision_aware_optimizer and not member.optimizer.state:  # it has its masters from the first step on
        return {}
    states: Mapping[str, torch.Tensor] = member._get_main_param_and_optimizer_states(parameter)
    return states


def _states(optimizer: torch.optim.Optimizer, main: torch.nn.Parameter) -> Mapping[str, torch.Tensor]:
    return {"param": main, **optimizer.state.get(main, {})}


def names_of(placed: Sequence[Placed]) -> tuple[str, ...]:
    """Return the names of all ranks' canonical tensors in the order of the forward pass. Collective over all ranks.

    Args:
        placed: this rank's, in Megatron's order, which within a layer has the attention's output layer before its inputs.
    """

    def place(name: str) -> tuple[int, bool, bool]:
        layer = _LAYER.search(name)
        number = int(layer[1]) if layer else -1 if name.startswith("embedding.") else sys.maxsize
        return number, "mlp" in name, ".linear_proj." in name

    everyones = collectives.everyones([one.name for one in placed])
    return tuple(sorted(dict.fromkeys(itertools.chain(*everyones)), key=place))  # stable: a layer's tensors keep their order
