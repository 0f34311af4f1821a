"""Dequantisation of block-scaled float8."""

from __future__ import annotations

import torch

from asyncmoe.reshard.float8 import BLOCK


def dequantised(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply each value by the scale of its block in float32, and round to `dtype`.

    Args:
        weight: float8[..., rows, columns].
        scales: float32[..., row blocks, column blocks].
    """
    height, width = weight.shape[-2:]
    wide = scales.float().repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return (weight.float() * wide[..., :height, :width]).to(dtype)
