"""What an SGLang server lacks on this machine."""

from __future__ import annotations

import importlib.util

import torch


def stand_ins() -> bool:
    """Whether SGLang's own kernels, or torchvision, which it imports, are missing here."""
    kernels = ("sgl_kernel", "flashinfer") if torch.cuda.is_available() else ()
    return any(importlib.util.find_spec(name) is None for name in ("torchvision", *kernels))
