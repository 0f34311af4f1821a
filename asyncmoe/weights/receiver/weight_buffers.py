"""The memory that a worker receives into: its parameters, its adapter memory, and the staging memory for either."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from asyncmoe.weights.protocol import Parameter

Tensors = dict[str, torch.Tensor]
_NOTIFIED = "on_lora_slots_updated"
_CACHES = (".k_scale", ".v_scale")


@dataclass(frozen=True)
class Staged:
    """A received update waiting for its commit.

    Attributes:
        tensors: the tensors to swap in; None if the target was written directly.
        delta: whether a delta is staged, which the commit writes into the target.
    """

    version: int
    update: int
    tensors: Tensors | None
    delta: bool = False


class Weights:
    """The tensors an update writes, under the names of the engine's layout: the parameters of a worker's model, by SGLang's names."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def described(self) -> dict[str, Parameter]:
        """Describe all tensors for the rendezvous."""
        found: dict[str, Parameter] = {}
        storages: dict[int, str] = {}
        for name, tensor in self.tensors().items():
            place = tensor.untyped_storage().data_ptr()
            found[name] = _parameter(tensor, storages.get(place, ""))
            storages.setdefault(place, name)
        return found

    def tensors(self) -> Tensors:
        """Return the actual tensors, to be written while the worker is paused."""
        return {name: parameter.data for name, parameter in _weights(self._model)}

    def room(self) -> Tensors:
        """Allocate staging memory for all tensors, on the calling thread's current stream."""
        return {name: torch.empty_like(tensor) for name, tensor in self.tensors().items()}

    def received(self, staged: Tensors) -> None:
        """Called in the receiving thread when `staged` (from `room` or `commit`) is complete: do the work that needs no pause."""

    def commit(self, staged: Tensors | None) -> Tensors:
        """Make the worker compute with `staged`, or with the values already written into `tensors`. Called between forward passes.

        Returns:
            Staging memory for the next update; empty if nothing was staged.
        """
        spare = {} if staged is None else _replace(self._model, staged)
        _refresh(self._model)
        return spare


class AdapterMemory:
    """The same as `Weights` for a worker's adapter memory, by the names of `asyncmoe.models.lora.sglang.memory_layout`.

    Every slot gets the same values: all requests name the single adapter (`asyncmoe.engines.adapters`), and SGLang does not expose
    which slot it uses. The adapter is pinned, so SGLang never refills a slot with the adapter's initial values.

    On CPU all slots are staged and swapped in: a module and SGLang's pool hold the same tensor, and no tensor views it. On another
    device a captured graph may hold the tensor's address, so the values are copied into it.

    Source: sglang 0.5.23 (lora/layers.py, `set_lora_info`; lora/lora_manager.py, `_notify_lora_slots_updated`; lora/mem_pool.py).
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._buffers: Tensors = dict(_slots(model))
        self._next: Tensors = {}
        self._notified: list[Any] = [getattr(module, _NOTIFIED) for module in model.modules() if hasattr(module, _NOTIFIED)]

    def described(self) -> dict[str, Parameter]:
        return {name: _parameter(tensor) for name, tensor in self.tensors().items()}

    def tensors(self) -> Tensors:
        return _slot(0, self._buffers)

    def room(self) -> Tensors:
        if any(buffer.device.type != "cpu" for buffer in self._buffers.values()):
            return {name: torch.empty_like(slot) for name, slot in self.tensors().items()}
        self._next = {name: torch.empty_like(buffer) for name, buffer in self._buffers.items()}
        return _slot(0, self._next)

    def received(self, staged: Tensors) -> None:
        if self._next:
            _spread(self._next, staged, first=1)

    def commit(self, staged: Tensors | None) -> Tensors:
        if staged is None:
            _spread(self._buffers, self.tensors(), first=1)
        elif self._next:
            for name, buffer in self._buffers.items():
                buffer.data, self._next[name] = self._next[name], buffer.data
            staged = _slot(0, self._next)
        else:
            _spread(self._buffers, staged, first=0)
        for notify in self._notified:
            notify(None)
        return staged or {}


def _slot(at: int, buffers: Tensors) -> Tensors:
    return {name: slots[at] for name, slots in buffers.items()}


def _spread(buffers: Tensors, new: Tensors, first: int) -> None:
    """Copy `new` into every slot from `first` on."""
    for at in range(first, min(map(len, buffers.values()), default=0)):
        torch._foreach_copy_([slots[at] for slots in buffers.values()], [new[name] for name in buffers])


def _parameter(tensor: torch.Tensor, shares: str = "") -> Parameter:
    return Parameter(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tuple(tensor.stride()), shares)


def _slots(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, memory of all slots [slots, ...]) for each half of each module with adapters."""
    for name, module in model.named_modules():
        layer = re.search(r"\blayers\.(\d+)\..*?(\w+)$", name)
        if layer is None:
            continue
        if hasattr(module, "gate_up_lora_a_weights"):
            for stack in ("gate_up", "down"):
                for half in "ab":
                    yield f"layers.{layer[1]}.{stack}_proj_moe.{half}", getattr(module, f"{stack}_lora_{half}_weights")
        elif isinstance(getattr(module, "lora_a", None), torch.Tensor):
            yield f"layers.{layer[1]}.{layer[2]}.a", module.lora_a
            yield f"layers.{layer[1]}.{layer[2]}.b", module.lora_b


def _replace(model: torch.nn.Module, staged: Mapping[str, torch.Tensor]) -> Tensors:
    """Make `staged` the model's parameters; return staging memory for the next update.

    Values are copied into a parameter if another tensor of the model views its storage, or if it is on a device where a captured graph may
    hold its address. Any other parameter takes over the staged tensor, and its old memory is returned.
    """
    free: Tensors = {}
    viewed = _viewed(model)
    for name, parameter in _weights(model):
        new, old = staged[name], parameter.data
        if old.device.type == "cpu" and old.untyped_storage().data_ptr() not in viewed:
            parameter.data, free[name] = new, old
        else:
            old.copy_(new)
            free[name] = new
    return free


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Return all parameters except KV-cache scales, which a float8 model has for any cache dtype (sglang 0.5.23,
    layers/quantization/kv_cache.py)."""
    return ((name, parameter) for name, parameter in model.named_parameters() if not name.endswith(_CACHES))


def _refresh(model: torch.nn.Module) -> None:
    """Update the tensors SGLang derives from parameters, as its own loaders do after writing them.

    `end_weight_update` skips `post_load_weights` after a custom-loader call (sglang 0.5.23, scheduler_components/weight_updater.py), and
    only a norm's own loader refreshes its `gemma_weight` (layers/layernorm.py).
    """
    if (post_load := getattr(model, "post_load_weights", None)) is not None:
        post_load()
    for module in model.modules():
        if (refresh_norm := getattr(module, "refresh_gemma_weight", None)) is not None:
            refresh_norm()


def _viewed(model: torch.nn.Module) -> set[int]:
    """Return data pointers to the storages of all tensors that modules have besides their parameters."""
    held = [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in (*held, *model.buffers()) if tensor.device.type != "meta"}
