"""What an SGLang server lacks on this machine."""

from __future__ import annotations

import importlib.util

import torch

from tests.gpu.bundle import servers


def candidates() -> tuple[servers.Server, ...]:
    """The servers that may start here, the best first."""
    card = torch.cuda.is_available()
    # SGLang imports torchvision whatever it serves.
    wanted = ("torchvision", "sgl_kernel", "flashinfer") if card else ("torchvision",)
    return servers.ladder(card, all(map(_installed, wanted)), _installed("triton"))


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
