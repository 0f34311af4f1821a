"""Preparing a process for SGLang where its kernel wheels are missing."""

from __future__ import annotations

import os
from types import ModuleType

import torch
from transformers.utils import import_utils

from asyncmoe.platform.sglang.patching import PatchTargetGone, after_import
from asyncmoe.platform.sglang.standin import provide, refuse
from tests.gpu.bundle import triton_experts


def prepare(triton: bool) -> None:
    """Install all stand-ins but those of a CPU; call before the first import of sglang, in every process.

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
        after_import("sglang.srt.utils.common", _torchs_operators)
        after_import("sglang.kernels.spec", _no_compiler)
    if triton:
        triton_experts.install()


def _torchs_operators(module: ModuleType) -> None:
    """Answers of sglang.srt.utils.common, which every layer asks for its operators: as on a CPU, where they are torch's. Only
    is_cuda_alike stays true: groups and streams are the card's."""
    answers = {"is_cuda": False, "is_cpu": True, "is_cuda_alike": True}
    for name, answer in answers.items():
        if not callable(getattr(module, name, None)):
            raise PatchTargetGone(f"{module.__name__}.{name} is gone")
        vars(module)[name] = lambda answer=answer: answer


def _no_compiler(module: ModuleType) -> None:
    """sglang.kernels chooses by the device between torch's operators and kernels that it compiles with nvcc when they are first used,
    which takes minutes: tell it of no device."""
    platform = getattr(module, "PlatformInfo", None)
    if not callable(getattr(platform, "detect", None)):
        raise PatchTargetGone(f"{module.__name__}.PlatformInfo.detect is gone")
    vars(module)["PlatformInfo"].detect = classmethod(lambda cls: cls())
