"""What stands in for CUDA packages in an engine on CPU, and that it notices another SGLang."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from asyncmoe.platform.sglang import cpu
from asyncmoe.platform.sglang.standin import decorate, provide, refuse


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    finders, modules = list(sys.meta_path), set(sys.modules)
    yield
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_a_kernel_package_imports_and_refuses_to_run() -> None:
    provide("absent_kernels", refuse, {"absent_kernels.scalar_type": None})
    kernels = importlib.import_module("absent_kernels")
    moe = importlib.import_module("absent_kernels.moe.fused")
    assert kernels.moe.fused is moe
    with pytest.raises(NotImplementedError, match=r"absent_kernels\.moe\.fused\.topk is a CUDA kernel"):
        moe.topk(1, 2)
    with pytest.raises(ImportError):
        importlib.import_module("absent_kernels.scalar_type")


def test_a_compiler_package_leaves_functions_as_they_are() -> None:
    provide("absent_compiler", decorate, {"absent_compiler.__version__": "3.0.0", "absent_compiler.cdiv": lambda a, b: -(a // -b)})
    compiler = importlib.import_module("absent_compiler")

    def kernel() -> int:
        return 7

    assert compiler.jit(kernel) is kernel
    assert compiler.autotune(configs=[compiler.Config({}, num_warps=4)], key=["n"])(kernel) is kernel
    assert compiler.cdiv(7, 2) == 4
    assert compiler.__version__ == "3.0.0"
    assert issubclass(type("Mine", (compiler.runtime.KernelInterface,), {}), compiler.runtime.KernelInterface)
    assert not hasattr(compiler, "__wrapped__")


def test_what_is_installed_is_not_replaced() -> None:
    provide("json", refuse, {})
    assert importlib.import_module("json").loads("[1]") == [1]


def test_another_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "version", lambda name: "0.6.0")
    with pytest.raises(cpu.PatchTargetGone, match=r"sglang: got 0\.6\.0, expected 0\.5\.23"):
        cpu.install()
    for near in ("0.5.23", "0.5.23.post1", "0.5.23+cpu"):
        monkeypatch.setattr(cpu, "version", lambda name, found=near: found)
        cpu._check_version()


def test_no_sglang_is_said() -> None:
    with pytest.raises(cpu.PatchTargetGone, match="no installed package"):
        cpu.install()


def test_a_patch_whose_target_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "sglang.srt.mem_cache.pool_host.common"
    monkeypatch.setattr(importlib, "import_module", lambda wanted: ModuleType(wanted))
    with pytest.raises(cpu.PatchTargetGone, match=f"{name}._cuda_host_register is gone"):
        cpu._pinned_host_memory()
