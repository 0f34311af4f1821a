"""Loads an optimizer state that was saved under another layout.

Tensors have the shapes and names of the model's parameters in every layout, but other parts of a checkpoint depend on the layout
(optimizer/optimizer.py, `ChainedOptimizer`, 0.16.1 and 0.19.2):

    common state  one mapping with groups of parameters, or one for each optimizer, of which there are two with expert parallelism; the step
                  in the groups, or beside them
    masters       `optimizer.state.param.` if the state is sharded, `optimizer.state.fp32_param.` if it is not and weights
                  are bfloat16; float32 weights with a state that is not sharded are their own masters

Loading asks for the names in the checkpoint, and converts the common state to this layout. Saves avoid the prefix that Megatron
adds to the names of the second optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncmoe.platform.megatron.patch import module

AVOID_PREFIX = {"chained_optim_avoid_prefix": True}
"""Entry for Megatron's metadata of a save: both optimizers save under a single optimizer's names."""
_SHARDED = "param_state"
_MASTERS = ("optimizer.state.param.", "optimizer.state.fp32_param.")
"""Prefixes of a parameter's name that form its master's name, one for each kind of optimizer with masters."""
_OF_LAYOUT = ("params", "is_expert_parallel")
"""Keys of a parameter group that depend on the layout: experts form groups of their own only with expert parallelism."""


class Missing(Exception):
    """Names a missing part of a checkpoint. Has one argument, so that it can be pickled between processes."""


@dataclass(frozen=True)
class AskedState:
    """Which parts of a requested optimizer state a checkpoint has.

    Attributes:
        lacking: a requested tensor that the checkpoint lacks under any name; "" if it has all.
        masters: False if the checkpoint has no masters, because its weights are float32 (see `take_weights`).
    """

    lacking: str
    masters: bool


def take_names_of(state: Any, saved: Collection[str]) -> AskedState:
    """Rename the tensors in a description of the optimizer's state to the names in a checkpoint.

    Args:
        state: the `sharded_state_dict` of Megatron's optimizer; changed in place.
        saved: names of all tensors in the checkpoint.
    """
    dicts, mapping = module("dist_checkpointing.dict_utils"), module("dist_checkpointing.mapping")
    lacking: list[str] = []
    without: list[str] = []

    def fit(value: Any) -> Any:
        if not isinstance(value, (mapping.ShardedTensor, mapping.ShardedTensorFactory)):
            return value
        own = value.key
        front = next((front for front in _MASTERS if own.startswith(front)), None)
        names = [own] if front is None else [other + own.removeprefix(front) for other in _MASTERS]
        if (key := next((name for name in names if name in saved), None)) is not None:
            value.key = key
        elif front is not None and own.removeprefix(front) in saved:
            without.append(own)
            return mapping.LocalNonpersistentObject(value.data)
        else:
            lacking.append(own)
        return value

    dicts.dict_list_map_inplace(fit, state)
    return AskedState(next(iter(lacking), ""), not without)


def take_weights(state: Any, optimizers: Sequence[Any]) -> None:
    """Use the model's loaded weights as the masters that a checkpoint lacks.

    Args:
        state: the loaded optimizer state; changed in place. If masters are not sharded, `reload_model_params` updates them.
    """
    parts = [state] if _SHARDED in state else [state[number] for number in sorted(state) if _SHARDED in state[number]]
    for part, one in zip(parts, optimizers, strict=False):
        # The order must be that of `sharded_param_state_fully_reshardable`, where each rank takes its own part of every parameter.
        weights = [weight for buffer in one.buffers for weight in buffer.param_index_map]
        for number, tensors in part[_SHARDED].items():
            tensors["param"] = weights[number].detach()


def optimizers(optimizer: Any) -> Sequence[Any]:
    """Return the members of a chained Megatron optimizer, or the optimizer itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def common_strategy(state: Any, optimizers: Sequence[Any]) -> Any:
    """Return a Megatron strategy that reads the state common to all ranks, with the optimizer's part converted to this layout.

    Args:
        state: the `sharded_state_dict` of Megatron's optimizer.
        optimizers: the optimizer's members.
    """
    base = module("dist_checkpointing.strategies.common").TorchCommonLoadStrategy

    class Translating(base):  # type: ignore[misc, valid-type]
        def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
            found: dict[str, Any] = super().load_common(checkpoint_dir)
            return {**found, "optimizer": translated(found.get("optimizer"), state, optimizers)}

    return Translating()


def translated(saved: Any, state: Any, optimizers: Sequence[Any]) -> dict[Any, Any]:
    """Return the common part of an optimizer's state, with the values of a checkpoint in the form of this layout.

    Args:
        saved: the checkpoint's common part.
        state, optimizers: see `common_strategy`.

    Raises:
        Missing: the checkpoint has no such group of parameters.
    """
    theirs = list(_parts(saved))
    groups = [group for part in theirs for group in part["param_groups"]]
    step = _step(theirs)
    made: dict[Any, Any] = _plain(state)
    for part, one in zip(_parts(made), optimizers, strict=True):
        in_groups = "state" not in part
        part["param_groups"] = [{**group, **_match(group, groups)} for group in part["param_groups"]]
        if isinstance(one.optimizer, torch.optim.Adam):  # it counts steps per parameter; AdamW is a subclass
            for group in part["param_groups"]:
                group.pop("step", None)
                group.update({"step": float(step or 0.0)} if in_groups else {})
            if not in_groups:
                part["state"] = {"common_step": torch.tensor(float(step or 0.0))}
        elif step is not None:
            for group in part["param_groups"]:
                group["step"] = int(step)
    return made


def _match(group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of the matching saved group, except those that depend on the layout."""
    for one in saved:
        if _identity(one) == _identity(group):
            return {name: copy.deepcopy(value) for name, value in one.items() if name not in _OF_LAYOUT}
    raise Missing(f"group of parameters with {', '.join(f'{name} {value}' for name, value in _identity(group).items())}")


def _identity(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that identify a parameter group in every layout."""
    names = module("optimizer.optimizer").param_group_identifier_keys
    return {name: group.get(name) for name in names if name not in _OF_LAYOUT}


def _step(parts: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the optimizers' common step count. A count beside the groups takes precedence: the groups may keep the count of another kind
    of optimizer that the run had before."""
    beside = [part["state"].get("common_step") for part in parts if isinstance(part.get("state"), Mapping)]
    inside = [group.get("step") for part in parts for group in part["param_groups"]]
    return next((float(step) for step in [*beside, *inside] if step is not None), None)


def _parts(value: Any) -> Iterator[dict[Any, Any]]:
    """Yield the mappings that hold groups of parameters, in the order of the optimizers."""
    if isinstance(value, Mapping):
        if "param_groups" in value:
            yield value  # type: ignore[misc]
        else:
            for name in sorted(value, key=lambda name: (str(type(name)), name)):
                yield from _parts(value[name])


def _plain(value: Any) -> Any:
    """Return the plain values in a description of state: all mappings and groups stay, other lists only if they hold plain values."""
    mapping = module("dist_checkpointing.mapping")
    if isinstance(value, (mapping.ShardedBase, mapping.LocalNonpersistentObject)):
        return _NOT_PLAIN
    if isinstance(value, dict):
        made = {name: _plain(one) for name, one in value.items()}
        return {name: one for name, one in made.items() if one is not _NOT_PLAIN or name == "param_groups"}
    if isinstance(value, list):
        return [one for one in map(_plain, value) if one is not _NOT_PLAIN and one != []] or _NOT_PLAIN
    return copy.deepcopy(value)


_NOT_PLAIN: list[Any] = []
