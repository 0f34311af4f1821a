"""Reads single tensors of a Hugging Face checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from asyncmoe.errors import DataError
from asyncmoe.models.headers import SINGLE, files_of
from asyncmoe.platform.float8 import dequantised
from asyncmoe.reshard.float8 import SCALES, scales_shape


class HFCheckpoint:
    """Tensors by name, from one `model.safetensors` or the shards listed in its index. Files are memory-mapped and opened on first use.

    Raises:
        DataError: neither exists, or the index is broken.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, Any] = {}
        named = files_of(path)
        self._file_of = dict.fromkeys(self._open(SINGLE).keys(), SINGLE) if named is None else named

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous copy of a tensor, cast to `dtype`; a float8 tensor in blocks is multiplied by its scales.

        Raises:
            DataError: the tensor or its scales are missing or have another shape.
        """
        tensor = self._tensor(name, shape)
        if tensor.dtype == torch.float8_e4m3fn:
            tensor = dequantised(tensor, self._tensor(name + SCALES, scales_shape(shape)), dtype)
        return tensor.to(dtype).contiguous()

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._file_of:
            raise DataError(f"{self._path}: tensor {name}", got="nothing", expected=f"a tensor of shape {list(shape)}")
        tensor: torch.Tensor = self._open(self._file_of[name]).get_tensor(name)
        if tuple(tensor.shape) != tuple(shape):
            raise DataError(f"{self._path}: tensor {name}", got=f"shape {list(tensor.shape)}", expected=f"shape {list(shape)}")
        return tensor

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(str(self._path / file), framework="pt")
            except (OSError, SafetensorError) as error:
                raise DataError(str(self._path / file), got=str(error), expected="a safetensors file") from error
        return self._files[file]
