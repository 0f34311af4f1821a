"""The policy that training started from, to stay close to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from asyncmoe.trainer.hf_checkpoint import HFCheckpoint
from asyncmoe.trainer.model import Model, local_tensors, named_parameters


class Reference:
    """A second copy of this rank's weights, on the host: those of the checkpoint that training starts from, after a resume too.

    Raises:
        DataError: see `model.load_hf`.
    """

    def __init__(self, model: Model, path: Path) -> None:
        self._model = model
        self._weights = dict(local_tensors(model, HFCheckpoint(path)))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Forward passes within use the reference's weights. The trainer's own are not written: they may be on their way to engines."""
        held: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        for name, parameter in named_parameters(self._model):
            held.append((parameter, parameter.data))
            parameter.data = self._weights[name].to(parameter.device, non_blocking=True)
        yield
        for parameter, own in held:
            parameter.data = own
