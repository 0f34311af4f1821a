"""What numbers of float8 in blocks stand for."""

from __future__ import annotations

import torch

from asyncmoe.reshard.float8 import BLOCK


def dequantised(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Each number times the scale of its block, in float32, then rounded.

    Args:
        weight: float8[..., rows, columns].
        scales: float32[..., blocks of rows, blocks of columns].
    """
    height, width = weight.shape[-2:]
    wide = scales.float().repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return (weight.float() * wide[..., :height, :width]).to(dtype)
