"""The checksum of an engine on a GPU: against what SGLang's kernels made under Triton's interpreter, and against their own source."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import asyncmoe
from asyncmoe.errors import LayoutError
from asyncmoe.reshard.checksum import engine_checksums, gpu_hash

SOURCE = "sglang/kernels/ops/memory/gpu_tensor_hash.py"
TILE = 4 * 8192
GOLDEN = {
    0: "0000000000000000",
    1: "3d93a6540b54ef2a",
    3: "2080a47c7e79c366",
    4: "b2dd353a7c0ed360",
    5: "f536406ada7bb683",
    1000: "26c2ba7bc70be9dc",
    TILE: "dbbe0ffe3ef7bcb0",
    TILE + 1: "24ccba8207d22c4e",
    3 * TILE + 7: "0b47b6f8079cd69f",
}
"""Bytes of `content` -> `gpu_tensor_hash` of sglang 0.5.23, run by triton 3.9.0 with TRITON_INTERPRET=1."""


def content(nbytes: int) -> np.ndarray:
    return (np.arange(nbytes, dtype=np.uint64) * 2654435761 >> 7).astype(np.uint8)


@pytest.mark.parametrize("nbytes", GOLDEN)
def test_it_is_what_sglangs_kernels_make(nbytes: int) -> None:
    assert engine_checksums({"w": content(nbytes)}, "cuda") == {"w": GOLDEN[nbytes]}


def test_the_two_hashes_differ_and_others_are_refused() -> None:
    values = content(64)
    assert engine_checksums({"w": values}, "cpu") != engine_checksums({"w": values}, "cuda")
    with pytest.raises(LayoutError, match=r"got npu, expected cpu or cuda; set sync\.verify_every=0"):
        engine_checksums({"w": values}, "npu")


def test_what_sglangs_kernel_cannot_count_is_refused() -> None:
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (1 << 33,), (0,))
    with pytest.raises(LayoutError, match="8 GiB"):
        gpu_hash("w", huge)


# ---------------------------------------------------------------- SGLang's source, with Triton's words done in NumPy


class Words:
    """What of `triton.language` the kernels use, of one program at a time."""

    uint32, uint64, constexpr = np.uint32, np.uint64, int

    def __init__(self) -> None:
        self.program = 0

    def program_id(self, axis: int) -> int:
        return self.program

    def full(self, shape: tuple[int, ...], value: int, dtype: Any) -> Any:
        return np.array(value & 0xFFFFFFFF).astype(dtype)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.zeros(shape, dtype)

    def arange(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop, dtype=np.int64)

    def load(self, pointer: Any, mask: Any, other: int, cache_modifier: str = "") -> Any:
        array, at = pointer
        return np.where(mask, array[np.minimum(at, len(array) - 1)], other).astype(array.dtype)

    def store(self, pointer: Any, value: Any) -> None:
        pointer[0][pointer[1]] = value

    def sum(self, values: np.ndarray, axis: int) -> Any:
        return Value(values.sum(axis=axis, dtype=values.dtype))

    def where(self, mask: Any, one: Any, other: Any) -> Any:
        return np.where(mask, one, other)

    zeros_like, static_range = staticmethod(np.zeros_like), staticmethod(range)


class Value(np.ndarray):
    """An array with Triton's `.to`."""

    def __new__(cls, values: Any) -> Value:
        return np.asarray(values).view(cls)

    def to(self, dtype: Any) -> Value:
        return Value(self.astype(dtype))


class Pointer:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __add__(self, at: Any) -> tuple[np.ndarray, Any]:
        return self.array, np.asarray(at)


def kernels() -> tuple[Any, Words]:
    """The functions of the installed source, which are launched as `kernel[grid](...)`."""
    words = Words()
    for name in ("full", "zeros", "arange", "load", "where"):
        real = getattr(words, name)
        setattr(words, name, lambda *a, real=real, **k: Value(real(*a, **k)))
    words.zeros_like = lambda values: Value(np.zeros_like(values))  # type: ignore[method-assign, assignment]

    class Kernel:
        def __init__(self, function: Any) -> None:
            self._function = function

        def __call__(self, *arguments: Any, **named: Any) -> Any:
            return self._function(*arguments, **named)

        def __getitem__(self, grid: tuple[int]) -> Any:
            def launch(*arguments: Any, num_warps: int = 0, num_stages: int = 0, **named: Any) -> None:
                given = [Pointer(a) if isinstance(a, np.ndarray) else a for a in arguments]
                for words.program in range(grid[0]):
                    self._function(*given, **named)

            return launch

    folders = Path(asyncmoe.__file__).parents[1].glob(".venv-engine/lib/python3*/site-packages")
    path = next((folder / SOURCE for folder in folders if (folder / SOURCE).exists()), None)
    if path is None:
        pytest.skip("SGLang is not installed in .venv-engine")
    triton = SimpleNamespace(jit=lambda f=None, **_: Kernel(f) if f else Kernel, cdiv=lambda a, b: -(-a // b), language=words)
    torch = SimpleNamespace(Tensor=object, inference_mode=lambda: lambda f: f, empty=lambda n, **_: Array(np.empty(n, np.uint64)), uint64=0)
    text = path.read_text().replace("import torch\nimport triton\nimport triton.language as tl\n", "")
    module: dict[str, Any] = {"torch": torch, "triton": triton, "tl": words}
    exec(compile(text, str(path), "exec"), module)
    return module, words


class Array(np.ndarray):
    """An array with torch's names."""

    is_cuda, device = True, "cuda:0"

    def __new__(cls, values: np.ndarray) -> Array:
        return values.view(cls)

    def numel(self) -> int:
        return self.size


@pytest.mark.parametrize("nbytes", [4, 4000, TILE, 2 * TILE + 8])
def test_it_is_what_the_installed_source_says(nbytes: int) -> None:
    if sys.byteorder != "little":
        pytest.skip("words are little-endian")
    module, _ = kernels()
    module["_as_uint32_words"] = lambda tensor: tensor
    with np.errstate(over="ignore"):
        found = module["gpu_tensor_hash"](Array(content(nbytes).view(np.uint32)))
    assert f"{found:016x}" == engine_checksums({"w": content(nbytes)}, "cuda")["w"]
