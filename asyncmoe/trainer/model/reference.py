"""The reference policy: the initial policy, to which training stays close."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import torch

from asyncmoe.models.hf_checkpoint import HFCheckpoint
from asyncmoe.trainer.lora import attach
from asyncmoe.trainer.model.gpt import Model, local_tensors, named_tensors

Reference = Callable[[], AbstractContextManager[None]]
"""A context whose forward passes compute the reference policy. The trainer's own weights are not overwritten, because a transfer to engines
may be reading them."""


def reference(model: Model, path: Path) -> Reference:
    """Return the policy that training started from, also after a resume: the model with its adapters switched off, which needs no memory,
    or, without adapters, a second copy of this rank's weights, on the host.

    Raises:
        DataError: see `gpt.load_hf`.
    """
    if model.adapter is not None:
        return partial(attach.switched_off, model.chunks)
    return partial(_exchanged, model, dict(local_tensors(model, HFCheckpoint(path))))


@contextmanager
def _exchanged(model: Model, weights: dict[str, torch.Tensor]) -> Iterator[None]:
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, tensor in named_tensors(model):
        held.append((tensor, tensor.data))
        tensor.data = weights[name].to(tensor.device, tensor.dtype, non_blocking=True)
    yield
    for tensor, own in held:
        tensor.data = own
