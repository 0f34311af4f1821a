"""Preparing a process for SGLang where its kernel wheels are missing."""

from __future__ import annotations

import os
from types import ModuleType

import torch
from transformers.utils import import_utils

from asyncmoe.platform.sglang import cpu
from asyncmoe.platform.sglang.patching import PatchTargetGone, after_import
from asyncmoe.platform.sglang.standin import provide, refuse
from tests.gpu.bundle import triton_experts


def prepare(triton: bool) -> None:
    """Install all stand-ins; call before the first import of sglang, in every process.

    Args:
        triton: SGLang's Triton kernels compute the experts.

    Raises:
        PatchTargetGone: another version of SGLang, or something that a stand-in replaces is no longer there.
    """
    import_utils.is_torchvision_available()  # transformers remembers the answer, and looks for no more than torchvision has
    provide("torchvision", refuse, {"torchvision.__version__": "0"})
    if torch.cuda.is_available():
        # SGLang asks its platform for graphs, streams and memory: it must be the card's.
        os.environ["SGLANG_USE_CPU_ENGINE"] = "0"
        after_import("sglang.srt.utils.common", _no_cuda)
    if triton:
        triton_experts.install()
    cpu.install()


def _no_cuda(module: ModuleType) -> None:
    """sglang.srt.utils.common.is_cuda decides in every layer whether kernels of the wheels are called, is_cuda_alike whether groups and
    streams are a card's. The second asks the first."""
    if not callable(getattr(module, "is_cuda", None)) or not callable(getattr(module, "is_cuda_alike", None)):
        raise PatchTargetGone(f"{module.__name__}.is_cuda or is_cuda_alike is gone")
    vars(module)["is_cuda"], vars(module)["is_cuda_alike"] = lambda: False, lambda: True
