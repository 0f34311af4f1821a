"""SGLang's checksums: of a CPU against their definition written with torch alone, of a GPU against results of SGLang's kernels."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from asyncmoe.errors import LayoutError
from asyncmoe.reshard.checksum import engine_checksums

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


def as_sglang_does(tensor: torch.Tensor) -> str:
    """`tensor_hash` and `_hash_tensor` of sglang 0.5.23, for one tensor on the CPU."""
    hasher = hashlib.sha256()
    hasher.update(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return f"{int.from_bytes(hasher.digest()[:8], byteorder='big', signed=False):016x}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_checksums_of_a_cpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parameters = {f"p{i}": torch.randn(3 + i, 5).to(dtype) for i in range(40)}  # 40: some checksum begins with a zero digit
    assert engine_checksums(parameters) == {name: as_sglang_does(tensor) for name, tensor in parameters.items()}


@pytest.mark.parametrize("nbytes", GOLDEN)
def test_checksums_of_a_gpu(nbytes: int) -> None:
    assert engine_checksums({"w": content(nbytes)}, "cuda") == {"w": GOLDEN[nbytes]}


def test_arrays_with_gaps_are_refused() -> None:
    with pytest.raises(LayoutError, match="weight"):
        engine_checksums({"weight": torch.zeros(4, 4).T})
