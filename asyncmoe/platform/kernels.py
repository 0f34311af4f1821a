"""Optional kernels: NVIDIA's Transformer Engine and NVIDIA's apex, used where they are installed and there is a GPU.

With Transformer Engine the model is built from its layers and grouped experts; with either, Megatron takes its fused Adam. Neither
is a requirement. The project called "apex" on the Python package index is unrelated to NVIDIA's.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from asyncmoe.errors import UserError


@dataclass(frozen=True)
class Kernels:
    """What is there and will be used."""

    transformer_engine: bool
    apex: bool

    def __str__(self) -> str:
        used = [name for name, there in (("Transformer Engine", self.transformer_engine), ("apex", self.apex)) if there]
        return " and ".join(used) or "PyTorch's own kernels only"


def detect() -> Kernels:
    """Look for both.

    Raises:
        UserError: a package called apex that is not NVIDIA's.
    """
    apex = _installed("apex")
    if apex and not _installed("apex.optimizers"):
        raise UserError(
            "the package apex",
            got="one without apex.optimizers",
            expected="NVIDIA's apex, built from its source, or none",
            cure="run: pip uninstall apex",
        )
    cuda = torch.cuda.is_available()
    return Kernels(transformer_engine=cuda and _installed("transformer_engine"), apex=cuda and apex)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
