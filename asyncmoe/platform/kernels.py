"""Detects the optional kernels that are installed and usable here. `asyncmoe.trainer.model.switches` sets Megatron accordingly.

NVIDIA's Transformer Engine has layers, grouped experts and fused operations; with it or with NVIDIA's apex Megatron uses a fused Adam;
DeepEP dispatches rows to their experts. All are optional. The project "apex" on the Python package index is unrelated to NVIDIA's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass

from packaging.version import Version

from asyncmoe.errors import UserError

_ENGINE = "transformer_engine"


@dataclass(frozen=True)
class Kernels:
    """The usable kernels.

    Attributes:
        cuda: a GPU is usable; without one no other kernel is.
        capability: the GPU's compute capability (9.0 is Hopper).
        transformer_engine: release of Transformer Engine, such as (2, 20); () if it is missing.
        apex: apex's optimizers are usable.
        deep_ep: DeepEP is usable.
    """

    cuda: bool = False
    capability: tuple[int, int] = (0, 0)
    transformer_engine: tuple[int, ...] = ()
    apex: bool = False
    deep_ep: bool = False


def detect() -> Kernels:
    """Detect all optional kernels.

    Raises:
        UserError: the installed package apex is not NVIDIA's.
    """
    import torch  # not at the top: the doctor asks this module's questions of what it found, without torch

    apex = _installed("apex")
    if apex and not _installed("apex.optimizers"):
        raise UserError(
            "the package apex",
            got="one without apex.optimizers",
            expected="NVIDIA's apex, built from its source, or none",
            hint="run: pip uninstall apex",
        )
    if not torch.cuda.is_available():
        return Kernels()
    return Kernels(
        cuda=True,
        capability=torch.cuda.get_device_capability(),
        transformer_engine=Version(importlib.metadata.version(_ENGINE)).release if _installed(_ENGINE) else (),
        apex=apex,
        deep_ep=_installed("deep_ep"),
    )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of the package above it
        return False
