"""A rank's part of the distributed optimizer's state as boxes of the parameters, so that it is written without communication.

Megatron's `fully_reshardable` checkpoints store the state in the shapes of the parameters, and its save first gathers the whole state on
every data-parallel rank (optimizer/distrib_optimizer.py, `sharded_param_state_fully_reshardable`, 0.16.1 and 0.19.2), which takes many
times the memory and time of a copy. A rank has a range of each flat parameter, and a range consists of a few boxes. Boxes written under a
tensor's name load as that tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch

from asyncmoe.errors import InvariantBroken
from asyncmoe.platform.megatron import patch
from asyncmoe.platform.megatron.patch import module

_METHOD = "sharded_param_state_fully_reshardable"


@contextmanager
def as_boxes() -> Iterator[None]:
    """Make the distributed optimizer describe only this rank's part of its state within the block.

    Raises:
        ConfigError: this version of Megatron describes the state differently.
    """
    owner = module("optimizer.distrib_optimizer").DistributedOptimizer
    original = getattr(owner, _METHOD, None)
    patch.replace(owner, _METHOD, _own_state)
    try:
        yield
    finally:
        setattr(owner, _METHOD, original)


def _own_state(self: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None) -> dict[str, Any]:
    """Return sharded tensors by parameter, all of them views of the optimizer's memory."""
    values = module("dist_checkpointing.dict_utils").nested_values(model_sharded_state_dict)
    known = {value.data: value for value in values if is_tensor(value)}
    found: dict[str, Any] = {}
    for parameter, own in own_ranges(self):
        states = self._get_main_param_and_optimizer_states(parameter)
        found[str(len(found))] = {
            name: list(_boxes(known[parameter], name, state, own.start)) for name, state in states.items() if name != "step"
        }
    return found


def is_tensor(value: object) -> bool:
    """Return whether a value in a description of state is a tensor."""
    mapping = module("dist_checkpointing.mapping")
    return isinstance(value, (mapping.ShardedTensor, mapping.ShardedTensorFactory))


def own_ranges(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, range]]:
    """Yield each parameter of which a distributed optimizer has a part on this rank, and the part's range in the flat parameter."""
    for ranges in optimizer.gbuf_ranges:
        for buckets in ranges.values():
            for parameter, places in ((one, at) for bucket in buckets for one, at in bucket["param_map"].items()):
                yield parameter, range(places["param"].start, places["param"].end)


def _boxes(described: Any, name: str, state: torch.Tensor, start: int) -> Iterator[Any]:
    """Yield the boxes of one state of a parameter.

    Args:
        described: Megatron's description of the whole parameter.
        name: name of the state ("exp_avg").
        state: [n]; this rank's part of the state, for elements `start` to `start + n` of the flat parameter.
    """
    # Ranks with the same parameter have different parts of its state, so all of them save: each is replica 0.
    named = {"key": f"optimizer.state.{name}.{described.key}", "replica_id": (*described.replica_id[:2], 0)}
    flat = state.detach().view(-1)
    for part in parts(described, state.dtype, **named):
        for corner, view in contiguous(part.data):
            first = int(view.storage_offset())
            lowest, highest = max(first, start), min(first + view.numel(), start + flat.numel())
            for box in boxes(tuple(view.shape), lowest - first, highest - first):
                added = (0,) * (len(corner) - len(box.offset)) + box.offset
                sizes = (1,) * (len(part.global_shape) - len(box.sizes)) + box.sizes
                inside = (0,) * part.prepend_axis_num + tuple(a + b for a, b in zip(corner, added, strict=True))
                yield replace(
                    part,
                    data=flat[first + box.begin - start : first + box.end - start].view(sizes),
                    local_shape=sizes,
                    global_offset=tuple(a + b for a, b in zip(part.global_offset, inside, strict=True)),
                    axis_fragmentations=None,
                    prepend_axis_num=0,
                )


def parts(described: Any, dtype: torch.dtype, **named: Any) -> list[Any]:
    """Return the sharded tensors that a parameter is saved as. Their data are views of a tensor without memory in the parameter's shape.

    Args:
        described: see `_boxes`.
        named: attributes that differ from those of `described`.
    """
    dicts, mapping = module("dist_checkpointing.dict_utils"), module("dist_checkpointing.mapping")
    whole = torch.empty(described.data.shape, dtype=dtype, device="meta")
    if isinstance(described, mapping.ShardedTensorFactory):
        built = {"": replace(described, data=whole, **named).build()}
        return [part for part in dicts.nested_values(built) if isinstance(part, mapping.ShardedTensor)]
    return [replace(described, data=whole, dtype=dtype, **named)]


def contiguous(view: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Split a view of a parameter into contiguous parts; yield each part's corner in the view, and the part."""
    if view.is_contiguous():
        yield (0,) * view.ndim, view
        return
    if view.ndim == 1:
        raise InvariantBroken("a parameter is saved in another order than in memory, so its optimizer state does not form boxes")
    for number in range(view.shape[0]):
        for corner, part in contiguous(view[number]):
            yield (number, *corner), part


class FlatBox(NamedTuple):
    """A part of an array: its start and length along each axis, and the index of its first element in the flat array."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int

    @property
    def end(self) -> int:
        """The index after its last element in the flat array; boxes from `boxes` are contiguous."""
        return self.begin + prod(self.sizes)


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[FlatBox]:
    """Yield contiguous boxes, in order, that cover elements `begin` to `end` (exclusive) of the flat array exactly once.

    At most 2 * len(shape) - 1 boxes: for each axis the rest of a row, whole rows, and the beginning of a row.
    """
    if begin >= end:
        return
    if len(shape) <= 1:
        yield FlatBox((begin,) if shape else (), (end - begin,) if shape else (), begin)
        return
    row = prod(shape[1:])
    while begin < end:
        number, inside = divmod(begin, row)
        if inside or end - begin < row:
            stop = min(end, (number + 1) * row)
            for box in boxes(shape[1:], inside, stop - number * row):
                yield FlatBox((number, *box.offset), (1, *box.sizes), number * row + box.begin)
        else:
            stop = end - end % row
            yield FlatBox((number, *(0 for _ in shape[1:])), ((stop - begin) // row, *shape[1:]), begin)
        begin = stop
