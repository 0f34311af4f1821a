"""Patches that let the SGLang 0.5.23 wheel run on a machine without CUDA; no other release is patched.

No file of SGLang is edited, and nothing is installed if there is a CUDA device. Servers import some of the patched modules only for some
models, so each of `PATCHES` in `cpu_*` is applied when its module is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import multiprocessing
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from asyncmoe.platform.sglang import cpu_dp_attention, cpu_experts, cpu_float8, cpu_latent, cpu_lora, cpu_memory, patching
from asyncmoe.platform.sglang.lifetime import end_with_parent
from asyncmoe.platform.sglang.patching import PatchTargetGone
from asyncmoe.platform.sglang.standin import decorate, provide, refuse

VERSION = "0.5.23"

ARGUMENTS = (
    *("--device", "cpu"),
    # The alternative, the AMX backend, needs sgl_kernel.
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    "--disable-cuda-graph",
    # There are no kernels to compile, so a warm-up request would waste seconds.
    "--skip-server-warmup",
    # Without this flag every idle scheduler spins on a core that the trainer could use.
    "--sleep-on-idle",
    # The other adapter backends are Triton kernels. Takes effect only with --enable-lora.
    *("--lora-backend", "torch_native"),
    # The default key-value cache takes a share of the whole machine's memory.
    *("--mem-fraction-static", "0.5", "--max-total-tokens", "16384"),
)
"""Defaults of a server on CPU; the caller's arguments follow and override them."""


def install() -> None:
    """Install all patches. Call it in every process before the first import of sglang.

    Raises:
        PatchTargetGone: a different version of SGLang.
    """
    _check_version()
    # sglang.srt.platforms chooses a CPU only on request.
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # SGLang compiles functions such as vocab_parallel_embedding.get_masked_input_and_mask; torch's compiler would inspect triton and
    # take seconds.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _triton()
    _sgl_kernel()
    _torchvision()
    patching.install(cpu_experts, cpu_lora, cpu_latent, cpu_float8, cpu_dp_attention, cpu_memory)
    _pinned_memory()


def fork_children() -> None:
    """Make the server fork its scheduler and detokenizer, which saves each of them seconds of importing torch and SGLang again.

    sglang.srt.entrypoints.engine._set_envs_and_config selects spawn for CUDA, because a forked process cannot use a device that its parent
    has opened. Call this after importing the modules that the children need, and before any computation.
    """
    module: Any = importlib.import_module("sglang.srt.entrypoints.engine")
    configure = module._set_envs_and_config

    def configured(*arguments: Any, **named: Any) -> None:
        configure(*arguments, **named)
        multiprocessing.set_start_method("fork", force=True)

    module._set_envs_and_config = configured
    os.register_at_fork(after_in_child=end_with_parent)


def _check_version() -> None:
    if Version(found := version("sglang")).base_version != VERSION:  # .post1 and +cpu are the same code
        raise PatchTargetGone(f"sglang: got {found}, expected {VERSION}; on a machine without CUDA only that version is supported")


def _triton() -> None:
    """Provide triton: sglang.srt.utils.common and many layers import it at the top and decorate kernels that never run on CPU."""
    provide(
        "triton",
        decorate,
        {
            "triton.__version__": "3.0.0",
            "triton.cdiv": lambda a, b: -(a // -b),
            "triton.next_power_of_2": lambda n: 1 << max(n - 1, 0).bit_length(),
            "triton.language.constexpr": type("constexpr", (), {"__init__": lambda self, value=None: setattr(self, "value", value)}),
        },
    )


def _sgl_kernel() -> None:
    """Provide sgl_kernel: sglang.srt.layers imports names from it on every device, but calls none of them on CPU without AMX.

    `sgl_kernel.scalar_type` must stay absent, so that sglang.srt.layers.quantization.utils uses its own definition.
    """
    provide("sgl_kernel", refuse, {"sgl_kernel.scalar_type": None})


def _torchvision() -> None:
    """Load torchvision's operators, or define schemas for torchvision._meta_registrations if loading fails, as in wheels for CUDA.
    torchvision.extension loads the same library again, which registers nothing twice."""
    package = importlib.util.find_spec("torchvision")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        with contextlib.suppress(OSError):
            torch.ops.load_library(str(Path(folder, "_C.so")))  # type: ignore[no-untyped-call]
            return
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _pinned_memory() -> None:
    """Disable pinning: sglang.srt.state_capturer.base pins its host buffer (routed experts) with cudaHostRegister even on a CPU."""
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]
    module: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.common")
    module._cuda_host_register = module._cuda_host_unregister = lambda *_, **__: None
