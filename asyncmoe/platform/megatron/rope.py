"""Rotary angles of packed sequences, without asking the device for their lengths.

`models/common/embeddings/rope_utils.py` takes the angles of each sequence apart with `cu_seqlens.tolist()`, and compares a number of the
device besides: the host waits for the device four times in every layer that has no fused kernel. Applied everywhere, by whoever builds
the model (`asyncmoe.trainer.model.layers`): latent attention has no fused kernel with Transformer Engine either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncmoe.errors import InvariantBroken
from asyncmoe.platform.megatron.patch import gone, module

_NAME = "_apply_rotary_pos_emb_thd"


def install() -> None:
    """Replace the function.

    Raises:
        ConfigError: this version of Megatron has no such function, or applies angles by another.
    """
    owner: Any = module("models.common.embeddings.rope_utils")
    original = getattr(owner, _NAME, None)
    if getattr(original, "__module__", None) == __name__:
        return
    if original is None or not {"_apply_rotary_pos_emb_bshd", "split"} <= set(original.__code__.co_names):
        raise gone(f"rope_utils.{_NAME}", everywhere=True)
    setattr(owner, _NAME, _by_position(owner._apply_rotary_pos_emb_bshd))


def _by_position(apply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def packed(t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, *args: Any, cp_group: Any, **kwargs: Any) -> torch.Tensor:
        """t [T, heads, d], freqs [longest, 1, 1, d] -> [T, heads, d]."""
        if cp_group.size() != 1:
            raise InvariantBroken("packed sequences: context parallelism is not supported")
        return apply(t.unsqueeze(1), freqs[positions(cu_seqlens, t.shape[0])], *args, **kwargs).squeeze(1)

    packed.__module__ = __name__
    return packed


def positions(cu_seqlens: torch.Tensor, rows: int) -> torch.Tensor:
    """int64[rows]: each row's place in its own sequence. cu_seqlens: int32[n + 1], from 0 to `rows`."""
    every = torch.arange(rows, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, every, right=True) - 1
    return every - cu_seqlens[sequence]
