"""Detects the optional kernels that are installed and usable here. `asyncmoe.trainer.model.switches` sets Megatron accordingly.

NVIDIA's Transformer Engine has layers, grouped experts, fused operations and a fused Adam; DeepEP dispatches rows to their experts. Both
are optional. Megatron itself uses the fused Adam of NVIDIA's apex if it is installed and Transformer Engine is not.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from packaging.version import Version

from asyncmoe.installed import has

_ENGINE = "transformer_engine"


@dataclass(frozen=True)
class Kernels:
    """The usable kernels.

    Attributes:
        cuda: whether a GPU is usable; without one, no kernel is.
        capability: the GPU's compute capability (9.0 is Hopper).
        transformer_engine: release of Transformer Engine, such as (2, 20); () if it is missing.
        deep_ep: whether DeepEP is usable.
    """

    cuda: bool = False
    capability: tuple[int, int] = (0, 0)
    transformer_engine: tuple[int, ...] = ()
    deep_ep: bool = False


def detect() -> Kernels:
    """Detect all optional kernels."""
    import torch  # not at the top: the doctor uses this module without torch

    if not torch.cuda.is_available():
        return Kernels()
    return Kernels(
        cuda=True,
        capability=torch.cuda.get_device_capability(),
        transformer_engine=Version(importlib.metadata.version(_ENGINE)).release if has(_ENGINE) else (),
        deep_ep=has("deep_ep"),
    )
