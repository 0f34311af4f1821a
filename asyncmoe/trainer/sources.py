"""What a rank's weights are sent from."""

from __future__ import annotations

import torch

from asyncmoe.models import family_of
from asyncmoe.trainer.model import Model, parameters


class Sources:
    """A rank's weights in the dtypes that `Family.megatron_layout` gives them.

    Some families have tensors that are float32 in every layout (`Shape.wide`): those that the trainer has in another dtype are sent
    from copies, which have the same values.

    Attributes:
        tensors: by the layout's names; the same memory every time.
    """

    def __init__(self, model: Model) -> None:
        live, dtype = parameters(model), str(model.dtype).removeprefix("torch.")
        layout = family_of(model.hf).megatron_layout(model.hf, model.parallel, model.mesh.rank, dtype)
        wanted = {name: getattr(torch, storage.dtype) for name, storage in layout.storages.items()}
        self._copied = {name: tensor for name, tensor in live.items() if tensor.dtype != wanted[name]}
        self.tensors = live | {name: torch.empty_like(tensor, dtype=wanted[name]) for name, tensor in self._copied.items()}

    def refresh(self) -> None:
        """Bring the copies up to date. While nothing is being sent."""
        for name, tensor in self._copied.items():
            self.tensors[name].copy_(tensor)
