"""Patch for attention in an engine on a machine without CUDA: sequences that generate share calls of torch's kernel; see `cpu`."""

from __future__ import annotations

from collections import defaultdict
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from asyncmoe.platform.sglang.patching import PatchTargetGone, after_import

BACKEND = "sglang.srt.layers.attention.torch_native_backend"
_SHORT = 512
"""Tokens of a sequence beyond which copying its keys and values out of the cache takes most of the time, in either way."""


def install() -> None:
    """Patch the module as soon as it is imported."""
    after_import(BACKEND, _together)


def _together(module: ModuleType) -> None:
    """Decode sequences of similar lengths in one call. SGLang calls the kernel for one after another, in every layer, which is most of the
    time of a small model."""
    backend: Any = getattr(module, "TorchNativeAttnBackend", None)
    if not hasattr(backend, "_run_sdpa_forward_decode"):
        raise PatchTargetGone(f"{module.__name__}.TorchNativeAttnBackend._run_sdpa_forward_decode is gone")
    one_by_one = vars(backend)["_run_sdpa_forward_decode"]

    def decode(
        self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        others = (encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size)
        if len(seq_lens) == 1 or encoder_lens is not None or causal or is_cross_attn or sliding_window_size is not None:
            one_by_one(self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, *others)
            return output
        for numbers, longest in groups(seq_lens.tolist()):
            rows = torch.tensor(numbers)
            q, requests, lengths = query[rows], req_pool_indices[rows], seq_lens[rows]
            if len(numbers) == 1 or longest > _SHORT:
                out = one_by_one(self, q, output[rows], k_cache, v_cache, req_to_token, requests, lengths, *others)
            else:
                out = attend(q, k_cache, v_cache, req_to_token[requests, :longest], lengths, scaling, enable_gqa)
            output[rows] = out
        return output

    backend._run_sdpa_forward_decode = decode


def groups(lengths: list[int]) -> list[tuple[list[int], int]]:
    """Return the numbers of sequences that share a call, with the longest's length: none is padded to twice its length."""
    found = defaultdict(list)
    for number, length in enumerate(lengths):
        found[(length - 1).bit_length()].append(number)
    return [(numbers, max(lengths[number] for number in numbers)) for numbers in found.values()]


def attend(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    scale: float | None,
    grouped: bool,
) -> torch.Tensor:
    """Attend with the newest token of each of n sequences to all of its own.

    Args:
        query: [n, heads, d].
        k_cache, v_cache: [slots of the cache, groups, d].
        slots: int[n, longest]; of a sequence's tokens in the cache, then of anything.
        lengths: int[n].

    Returns:
        [n, heads, d of v_cache], in the query's dtype.
    """
    mine = torch.arange(slots.shape[1]) < lengths[:, None]
    slots = slots.where(mine, slots[:, :1])  # numbers beyond a sequence's end are old, and may be of slots that hold no numbers
    keys, values = (cache[slots].to(query.dtype).transpose(1, 2) for cache in (k_cache, v_cache))
    mask = None if bool(mine.all()) else mine[:, None, None]
    return F.scaled_dot_product_attention(query[:, :, None], keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)[:, :, 0]
