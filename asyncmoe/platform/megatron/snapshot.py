"""What a rank writes of a checkpoint: which memory holds each shard, and what Megatron and torch want to know of all ranks' shards.

Megatron saves asynchronously with processes that it starts or forks, which outlive a rank that is killed (see `writer`), and plans anew for
each save. Here its planning is used, once: shapes and places do not change from save to save, so later saves only copy.
"""

from __future__ import annotations

import copy
import io
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from asyncmoe.platform.megatron import state_boxes
from asyncmoe.platform.megatron.patch import gone, module

FORMAT = ("torch_dist", 1)
"""The only format that is written and loaded: `reader` checks its files."""
_CONSTANT = "_extra_state"
"""Suffix of the objects that never change: `reader` refuses any that says something."""


@dataclass(frozen=True)
class Shard:
    """A tensor of a rank's files. `live` is the memory that training changes, a view."""

    name: str
    offset: tuple[int, ...]
    live: torch.Tensor


@dataclass(frozen=True)
class Planned:
    """What this rank writes at every save.

    Attributes:
        shards: tensors; `objects`: by name, the bytes of what is no tensor.
        metadata: of all ranks' shards, without their places in files; None but on rank 0.
        common: what all ranks have in common, as of the save that was planned.
        format: what `metadata.json` says of the files.
        identity: addresses of everything that could be saved: the plan holds while they are the same.
        repeats: False if later saves must be planned anew, because something may change that is not copied.
    """

    shards: tuple[Shard, ...]
    objects: tuple[tuple[str, bytes], ...]
    metadata: Metadata | None
    common: dict[str, Any]
    format: Mapping[str, Any]
    identity: tuple[tuple[int, int], ...]
    repeats: bool


def plan(
    make_state: Callable[[], dict[str, Any]], modules: Iterable[torch.nn.Module], optimizer: Any, gather: Callable[[Any], list[Any] | None]
) -> Planned:
    """Plan what every rank writes. Collective over all ranks; call it between steps.

    Args:
        make_state: makes Megatron's sharded state; called while the distributed optimizer describes its own part only.
        modules: whose parameters and buffers are saved.
        gather: returns all ranks' objects on rank 0, and None elsewhere.

    Raises:
        ConfigError: this version of Megatron plans differently.
    """
    states, strategies = module("dist_checkpointing.state_dict_utils"), module("dist_checkpointing.strategies.torch")
    for name in ("mcore_to_pyt_state_dict", "_replace_state_dict_keys_with_sharded_keys", "MCoreSavePlanner"):
        if not hasattr(strategies, name):
            raise gone(f"strategies.torch.{name}", everywhere=True)
    distributed = any(hasattr(one, "gbuf_ranges") for one in optimizers(optimizer))
    with state_boxes.as_boxes() if distributed else nullcontext():
        sharded, common = states.save_preprocess(make_state(), True)
    flat, *_ = strategies._replace_state_dict_keys_with_sharded_keys(sharded, True)
    values = strategies.mcore_to_pyt_state_dict(flat, False)
    planner = strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    planner.set_up_planner(values, is_coordinator=False)
    local = planner.create_local_plan()
    everyones = gather(local)
    metadata = None if everyones is None else planner.create_global_plan(everyones)[1]
    shards: list[Shard] = []
    objects: list[tuple[str, bytes]] = []
    for item in planner.finish_plan(local).items:
        value = planner.resolve_data(item)
        if isinstance(value, io.BytesIO):
            objects.append((item.index.fqn, value.getvalue()))
        else:
            shards.append(Shard(item.index.fqn, tuple(item.index.offset), value.detach()))
    described = asdict(module("dist_checkpointing.core").CheckpointingConfig(*FORMAT))
    memory = list(_memory(modules, optimizer))
    spans = _joined((tensor.data_ptr(), tensor.data_ptr() + _nbytes(tensor)) for tensor in memory)
    repeats = (
        all(_within(shard.live, spans) for shard in shards)
        and all(_CONSTANT in name for name, _ in objects)
        and _same(common, refreshed(common, optimizer))
        and not list(_unknown(common))
    )
    return Planned(tuple(shards), tuple(objects), metadata, common, described, _identity(memory), repeats)


def holds(planned: Planned, modules: Iterable[torch.nn.Module], optimizer: Any) -> bool:
    """Return whether a save may follow an earlier plan: everything still lies where it lay."""
    return planned.repeats and planned.identity == _identity(_memory(modules, optimizer))


def optimizers(optimizer: Any) -> Sequence[Any]:
    """Return Megatron's optimizers that a chained one is made of, or the one itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def refreshed(common: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """Return a copy of `common` with the values that the optimizers' groups, and their count of steps, have now."""
    found = copy.deepcopy(common)
    for part, one in zip(_parts(found.get("optimizer")), optimizers(optimizer), strict=False):
        step = next((state["step"] for state in one.optimizer.state.values() if "step" in state), None)
        for saved, live in zip(part["param_groups"], one.optimizer.param_groups, strict=False):
            # What is None on a group that was never stepped, such as an empty one's count of steps, is None in all saves.
            saved |= {name: copy.deepcopy(live[name]) for name in saved.keys() & live.keys() - {"params"}}
            if "step" in saved and "step" not in live and step is not None:
                saved["step"] = _like(saved["step"], step)
        state = part.get("state")
        if isinstance(state, dict) and "common_step" in state and step is not None:
            state["common_step"] = _like(state["common_step"], step)
    return found


def _like(saved: Any, step: Any) -> Any:
    """Return a count of steps, not a reference to it, of the type of a saved one."""
    if isinstance(saved, torch.Tensor):
        return torch.as_tensor(step).detach().clone()
    return type(saved)(float(step)) if saved is not None else None


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the mappings that hold groups, in the order of the optimizers."""
    if isinstance(value, dict):
        if "param_groups" in value:
            yield value
        else:
            for name in sorted(value, key=lambda name: (str(type(name)), name)):
                yield from _parts(value[name])


def _unknown(value: Any) -> Iterator[Any]:
    """Yield the values of a common state that could change and that `refreshed` does not renew."""
    if isinstance(value, dict):
        for name, one in value.items():
            if name not in ("param_groups", "common_step"):
                yield from _unknown(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _unknown(one)
    elif not isinstance(value, (str, bool, type(None))):
        yield value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _memory(modules: Iterable[torch.nn.Module], optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield all memory that a checkpoint is a copy of: weights, buffers, and what the optimizers keep."""
    for each in modules:
        yield from each.parameters()
        yield from each.buffers()
    for one in optimizers(optimizer):
        for group in one.optimizer.param_groups:
            yield from group["params"]
        for state in one.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _identity(memory: Iterable[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((tensor.data_ptr(), _nbytes(tensor)) for tensor in memory if tensor.ndim)


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of spans of memory, sorted, none of which touch: a rank's part of a parameter lies within the parameter."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def _within(view: torch.Tensor, spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether a view lies in the memory of `spans`, which `_joined` made: (first byte, byte after the last)."""
    if not view.numel():
        return True
    first = view.data_ptr()
    last = first + (sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)) + 1) * view.element_size()
    place = bisect_right(spans, (first, 1 << 63)) - 1
    return place >= 0 and last <= spans[place][1]


def index_of(name: str, offset: tuple[int, ...] | None) -> MetadataIndex:
    """Return the key under which a checkpoint's metadata has a shard's place."""
    return MetadataIndex(name, None if offset is None else torch.Size(offset))
