"""The tensors from which a rank sends its weights, or its adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from asyncmoe.models.payload import Payload
from asyncmoe.reshard.float8 import Scaler
from asyncmoe.reshard.layout import Storage
from asyncmoe.weights.sender.trained import TrainedModel


def empty(storages: Mapping[str, Storage], device: torch.device) -> dict[str, torch.Tensor]:
    """Return uninitialised tensors for storages, by name."""
    return {name: torch.empty(one.shape, dtype=getattr(torch, one.dtype), device=device) for name, one in storages.items()}


class WeightSources:
    """A rank's weights in the dtypes of `Family.megatron_layout`.

    Some families have tensors that are float32 in every layout (`Shape.wide`). If the trainer has such a tensor in another dtype, it is
    sent from a float32 copy of the same values. Weights that engines have in float8 are quantised while they are packed, with scales that
    `refresh` computes beforehand.

    Attributes:
        tensors: by the layout's names; always the same tensors.
        copies: those that are not the trainer's own.

    Args:
        moves: the tensors' addresses may change between one `refresh` and the next.
    """

    def __init__(self, model: TrainedModel, moves: bool = False) -> None:
        live, dtype = model.weights(), str(model.dtype).removeprefix("torch.")
        payload = Payload(model.hf)
        layout = payload.weights_of_trainer(model.parallel, model.mesh.rank, dtype)
        wanted = {name: getattr(torch, storage.dtype) for name, storage in layout.storages.items()}
        self._copied = {name: tensor for name, tensor in live.items() if tensor.dtype != wanted[name]}
        copies = {name: torch.empty_like(tensor, dtype=wanted[name]) for name, tensor in self._copied.items()}
        self._device, self._moves = model.mesh.device, moves
        self._scaler: Scaler | None = None
        self._new_scaler: Callable[[], Scaler] | None = None
        if payload.float8 is not None:
            copies |= empty({name: storage for name, storage in layout.storages.items() if name not in live}, self._device)
            self._new_scaler = partial(Scaler, layout, live | copies, power_of_two=payload.float8.power_of_two)
        self.tensors, self.copies = live | copies, tuple(copies.values())

    def refresh(self) -> None:
        """Update copies and scales from the current weights. Call it only while nothing is being sent."""
        for name, tensor in self._copied.items():
            self.tensors[name].copy_(tensor)
        if self._new_scaler is not None and (self._scaler is None or self._moves):
            self._scaler = self._new_scaler()
        if self._scaler is not None:
            on_gpu = self._device.type == "cuda"
            self._scaler.write(stream=torch.cuda.current_stream(self._device).cuda_stream if on_gpu else 0)


class AdapterSources:
    """Copies of a rank's adapter halves, with B multiplied by the adapter's scale; training continues while the copies are sent.

    Attributes:
        tensors: by the names of `live`; always the same tensors.
        copies: all of them.

    Args:
        live: the trained halves.
        scale: alpha / rank. Engines receive an adapter of scale 1 (`asyncmoe.models.lora.sglang.memory_layout`).
    """

    def __init__(self, live: Mapping[str, torch.Tensor], scale: float) -> None:
        self._live = list(live.items())
        self._scale = scale
        self.tensors = {name: torch.empty_like(value) for name, value in self._live}
        self.copies = tuple(self.tensors.values())
        self._scaled = [value for name, value in self.tensors.items() if name.endswith("_b")]

    def refresh(self) -> None:
        """Copy the current halves. Call it only while nothing is being sent."""
        torch._foreach_copy_(list(self.tensors.values()), [value for _, value in self._live])
        if self._scale != 1:
            torch._foreach_mul_(self._scaled, self._scale)
