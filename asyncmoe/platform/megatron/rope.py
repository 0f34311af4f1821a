"""Rotary angles of packed sequences without device synchronization.

`models/common/embeddings/rope_utils.py` splits the angles by sequence with `cu_seqlens.tolist()`, and also compares a number on the
device, so without a fused kernel the host waits for the device four times per layer. `asyncmoe.trainer.model.layers` applies the patch
everywhere, because latent attention has no fused kernel even with Transformer Engine.
"""

from __future__ import annotations

from typing import Any

import torch

from asyncmoe.platform.megatron.patch import gone, module
from asyncmoe.platform.zigzag import positions

_NAME = "_apply_rotary_pos_emb_thd"


def install() -> None:
    """Replace Megatron's function.

    Raises:
        ConfigError: this version of Megatron has no such function, or its function applies the angles differently.
    """
    owner: Any = module("models.common.embeddings.rope_utils")
    original = getattr(owner, _NAME, None)
    if original is None or not {"_apply_rotary_pos_emb_bshd", "split"} <= set(original.__code__.co_names):
        raise gone(f"rope_utils.{_NAME}")
    apply = owner._apply_rotary_pos_emb_bshd

    def packed(t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, *args: Any, cp_group: Any, **kwargs: Any) -> torch.Tensor:
        """Rotate t [T, heads, d] by freqs [longest, 1, 1, d] -> [T, heads, d]."""
        here = positions(cu_seqlens, t.shape[0], cp_group.size(), cp_group.rank())
        turned: torch.Tensor = apply(t.unsqueeze(1), freqs[here], *args, **kwargs).squeeze(1)
        return turned

    setattr(owner, _NAME, packed)
