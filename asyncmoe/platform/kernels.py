"""Detects the optional kernels that are installed and usable here. `asyncmoe.trainer.model.switches` sets Megatron accordingly.

NVIDIA's Transformer Engine has layers, grouped experts, fused operations and a fused Adam; DeepEP dispatches rows to their experts. Both
are optional. Megatron itself uses the fused Adam of NVIDIA's apex if it is installed and Transformer Engine is not.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from packaging.version import Version

from asyncmoe.errors import UserError
from asyncmoe.installed import has

_ENGINE = "transformer_engine"
_NO_DEEP_EP = "DeepEP (the package deep_ep) is not installed"


@dataclass(frozen=True)
class Kernels:
    """The usable kernels.

    Attributes:
        cuda: whether a GPU is usable; without one, no kernel is.
        capability: the GPU's compute capability (9.0 is Hopper).
        transformer_engine: release of Transformer Engine, such as (2, 20); () if it is missing.
        lacks_deep_ep: why Megatron cannot use DeepEP; "" if it can.
    """

    cuda: bool = False
    capability: tuple[int, int] = (0, 0)
    transformer_engine: tuple[int, ...] = ()
    lacks_deep_ep: str = _NO_DEEP_EP


def detect() -> Kernels:
    """Detect all optional kernels.

    Raises:
        UserError: deep_ep fails in a way that keeps Megatron from being imported.
    """
    import torch  # not at the top: the doctor uses this module without torch

    if not torch.cuda.is_available():
        return Kernels()
    return Kernels(
        cuda=True,
        capability=torch.cuda.get_device_capability(),
        transformer_engine=Version(importlib.metadata.version(_ENGINE)).release if has(_ENGINE) else (),
        lacks_deep_ep=_lacks_deep_ep() if has("deep_ep") else _NO_DEEP_EP,
    )


def _lacks_deep_ep() -> str:
    """Return why Megatron cannot use the installed deep_ep, or "".

    These are Megatron's own imports (megatron-core 0.16.1, transformer/moe/fused_a2a.py): whatever the run, Megatron makes them and catches
    only ImportError. With DeepEP 2 and SGLang's build of it, sgl-deep-ep, they fail because `deep_ep.utils` has no EventOverlap.
    """
    try:
        from deep_ep import Buffer  # noqa: F401
        from deep_ep.utils import EventHandle, EventOverlap  # noqa: F401
    except ImportError as error:
        return f"Megatron cannot use the installed deep_ep, only one like DeepEP 1.2.1 ({error})"
    except Exception as error:
        raise UserError(
            "importing deep_ep", got=repr(error), expected="success, because Megatron imports it", hint="uninstall it"
        ) from error
    return ""
