"""The sender's view of the trained model (`asyncmoe.trainer.model.gpt.Model`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from asyncmoe.models import MegatronParallel
from asyncmoe.models.lora.adapter import Kind


class TrainerRank(Protocol):
    """A trainer rank: its number among `world`, its device, and the backend of the default process group ("nccl", "gloo")."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def backend(self) -> str: ...


class TrainedModel(Protocol):
    """One rank's part of the model.

    Attributes:
        hf: the Hugging Face configuration.
        dtype: dtype of the parameters.
        parallel: the parallel sizes.
        mesh: this rank's position.
        adapter: the adapter trained in place of the weights, if any.
    """

    @property
    def hf(self) -> Mapping[str, Any]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def parallel(self) -> MegatronParallel: ...
    @property
    def mesh(self) -> TrainerRank: ...
    @property
    def adapter(self) -> Kind | None: ...

    def weights(self) -> dict[str, torch.Tensor]:
        """Return this rank's weights, not copies, by the storage names of `Family.megatron_layout`."""

    def adapter_values(self) -> dict[str, torch.Tensor]:
        """Return this rank's halves of the adapter, not copies, by the names of `asyncmoe.models.lora.halves`."""
