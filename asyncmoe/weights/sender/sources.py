"""The tensors from which a rank sends its weights, or its adapter."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asyncmoe.models.payload import Payload
from asyncmoe.reshard.float8 import write_scales
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
    """

    def __init__(self, model: TrainedModel) -> None:
        live, dtype = model.weights(), str(model.dtype).removeprefix("torch.")
        payload = Payload(model.hf)
        layout = payload.weights_of_trainer(model.parallel, model.mesh.rank, dtype)
        wanted = {name: getattr(torch, storage.dtype) for name, storage in layout.storages.items()}
        self._copied = {name: tensor for name, tensor in live.items() if tensor.dtype != wanted[name]}
        self.tensors = live | {name: torch.empty_like(tensor, dtype=wanted[name]) for name, tensor in self._copied.items()}
        self._device, self._layout, self._float8 = model.mesh.device, layout, payload.float8
        if self._float8 is not None:
            self.tensors |= empty({name: storage for name, storage in layout.storages.items() if name not in live}, self._device)

    def refresh(self) -> None:
        """Update copies and scales from the current weights. Call it only while nothing is being sent."""
        for name, tensor in self._copied.items():
            self.tensors[name].copy_(tensor)
        if self._float8 is not None:
            stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
            write_scales(self._layout, self.tensors, power_of_two=self._float8.power_of_two, stream=stream)


class AdapterSources:
    """Copies of a rank's adapter halves, with B multiplied by the adapter's scale; training continues while the copies are sent.

    Attributes:
        tensors: by the names of `live`; always the same memory.

    Args:
        live: the trained halves.
        scale: alpha / rank. Engines receive an adapter of scale 1 (`asyncmoe.models.lora.sglang.memory_layout`).
    """

    def __init__(self, live: Mapping[str, torch.Tensor], scale: float) -> None:
        self._live = list(live.items())
        self._scale = scale
        self.tensors = {name: torch.empty_like(value) for name, value in self._live}
        self._scaled = [value for name, value in self.tensors.items() if name.endswith("_b")]

    def refresh(self) -> None:
        """Copy the current halves. Call it only while nothing is being sent."""
        torch._foreach_copy_(list(self.tensors.values()), [value for _, value in self._live])
        if self._scale != 1:
            torch._foreach_mul_(self._scaled, self._scale)
