"""Reading single tensors of a Hugging Face checkpoint, and errors for broken ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncmoe.errors import DataError
from asyncmoe.models.headers import INDEX, SINGLE
from asyncmoe.models.hf_checkpoint import HFCheckpoint


@pytest.mark.parametrize("file", [SINGLE, "x.safetensors"])
def test_tensors_are_read_by_name_and_what_is_not_there_is_named(file: str, tmp_path: Path) -> None:
    """Of one file, or of shards, which are opened when they are needed."""
    with pytest.raises(DataError, match=r"model\.safetensors: got No such file"):
        HFCheckpoint(tmp_path)
    save_file({"a": torch.arange(6.0).reshape(2, 3)}, tmp_path / file)
    if file != SINGLE:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": file, "b": "gone.safetensors"}}))
    checkpoint = HFCheckpoint(tmp_path)
    read = checkpoint.read("a", (2, 3), torch.bfloat16)
    assert (read.dtype, read.tolist()) == (torch.bfloat16, [[0, 1, 2], [3, 4, 5]])
    with pytest.raises(DataError, match=r"tensor a: got shape \[2, 3\], expected shape \[2, 1\]"):
        checkpoint.read("a", (2, 1), torch.float32)
    missing = r"tensor b: got nothing, expected a tensor of shape \[4\]" if file == SINGLE else r"gone\.safetensors"
    with pytest.raises(DataError, match=missing):
        checkpoint.read("b", (4,), torch.float32)
    (tmp_path / file).write_bytes(b"no")
    with pytest.raises(DataError, match="expected a safetensors file"):
        HFCheckpoint(tmp_path).read("a", (2, 3), torch.float32)
