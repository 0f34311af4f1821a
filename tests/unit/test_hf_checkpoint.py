"""Reading single tensors of a Hugging Face checkpoint, and what is said about broken ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncmoe.errors import DataError
from asyncmoe.models.headers import INDEX, SINGLE
from asyncmoe.models.hf_checkpoint import HFCheckpoint


def test_one_file(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6.0).reshape(2, 3)}, tmp_path / SINGLE)
    read = HFCheckpoint(tmp_path).read("a", (2, 3), torch.bfloat16)
    assert read.dtype == torch.bfloat16
    assert read.float().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_shards_are_opened_when_needed(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "gone.safetensors"}}))
    checkpoint = HFCheckpoint(tmp_path)
    assert checkpoint.read("a", (2,), torch.float32).tolist() == [1, 1]
    with pytest.raises(DataError, match=r"gone\.safetensors"):
        checkpoint.read("b", (2,), torch.float32)


def test_a_missing_tensor_and_a_wrong_shape_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / SINGLE)
    checkpoint = HFCheckpoint(tmp_path)
    with pytest.raises(DataError, match=r"tensor b: got nothing, expected a tensor of shape \[4\]"):
        checkpoint.read("b", (4,), torch.float32)
    with pytest.raises(DataError, match=r"tensor a: got shape \[2\], expected shape \[2, 1\]"):
        checkpoint.read("a", (2, 1), torch.float32)


def test_a_file_that_is_not_safetensors_and_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model\.safetensors: got No such file"):
        HFCheckpoint(tmp_path)
    (tmp_path / SINGLE).write_bytes(b"no")
    with pytest.raises(DataError, match="expected a safetensors file"):
        HFCheckpoint(tmp_path)
