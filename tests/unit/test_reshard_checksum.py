"""SGLang's checksum, against its definition written with torch alone."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from asyncmoe.errors import LayoutError
from asyncmoe.reshard.checksum import engine_checksums


def as_sglang_does(tensor: torch.Tensor) -> str:
    """`tensor_hash` and `_hash_tensor` of sglang 0.5.23, for one tensor on the CPU."""
    hasher = hashlib.sha256()
    hasher.update(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return f"{int.from_bytes(hasher.digest()[:8], byteorder='big', signed=False):016x}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_checksums(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parameters = {f"p{i}": torch.randn(3 + i, 5).to(dtype) for i in range(40)}  # 40: some checksum begins with a zero digit
    expected = {name: as_sglang_does(tensor) for name, tensor in parameters.items()}
    assert engine_checksums(parameters) == expected
    assert any(text.startswith("0") for text in expected.values())


def test_known_value() -> None:
    assert engine_checksums({"empty": np.zeros(0, np.float32)}) == {"empty": "e3b0c44298fc1c14"}  # SHA-256 of nothing
    assert engine_checksums({"abc": np.frombuffer(b"abc", np.uint8)}) == {"abc": "ba7816bf8f01cfea"}  # FIPS 180-2, B.1


def test_arrays_with_gaps_are_refused() -> None:
    with pytest.raises(LayoutError, match="weight"):
        engine_checksums({"weight": torch.zeros(4, 4).T})
