"""The reference policy: the initial policy, to which training stays close."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch

from asyncmoe.models.hf_checkpoint import HFCheckpoint
from asyncmoe.trainer.lora import attach
from asyncmoe.trainer.model.gpt import Model, local_tensors, named_tensors


class Reference(Protocol):
    """Runs forward passes of the reference policy."""

    def in_place(self) -> AbstractContextManager[None]:
        """Run forward passes with the reference policy. The trainer's own weights are not written: they may be on their way to engines."""


def reference(model: Model, path: Path) -> Reference:
    """Return the policy of the checkpoint that training started from, after a resume too.

    Raises:
        DataError: see `gpt.load_hf`.
    """
    return SecondCopy(model, path) if model.adapter is None else WithoutAdapter(model)


class WithoutAdapter:
    """The model with its adapters switched off, which needs no extra memory."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def in_place(self) -> AbstractContextManager[None]:
        return attach.switched_off(self._model.chunks)


class SecondCopy:
    """A second copy of this rank's weights, on the host.

    Raises:
        DataError: see `gpt.load_hf`.
    """

    def __init__(self, model: Model, path: Path) -> None:
        self._model = model
        self._weights = dict(local_tensors(model, HFCheckpoint(path)))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, tensor in named_tensors(self._model):
            held.append((tensor, tensor.data))
            tensor.data = self._weights[name].to(tensor.device, tensor.dtype, non_blocking=True)
        yield
        for tensor, own in held:
            tensor.data = own
