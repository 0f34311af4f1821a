"""Core attention for Megatron's local layer spec: causal, grouped queries, packed sequences.

Megatron's own local attention asserts that there are no packed sequences, and builds the full score matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from inspect import signature
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

from asyncmoe.errors import InvariantBroken
from asyncmoe.platform.megatron import context_attention

Kernel = Literal["varlen", "each"]
_FLASH_HEAD = 256
"""The widest head that flash attention supports; widths must be multiples of 8."""
_SHORT = 512
"""Sequence length below which torch's CPU kernel is slower in bfloat16 than in float32: at 42 rows by a factor of 3.4."""


class PackedSequences(PackedSeqParams):  # type: ignore[misc]
    """Megatron's parameters of packed sequences, with the bounds on the host too: reading them from the device would stall every layer.

    Args:
        cu_seqlens: int32[n + 1], on the model's device; starts of the packed sequences, then T; padding is a sequence of its own.
            With context parallelism, rows are counted over all its ranks, and sequences include their padding.
        bounds: the same numbers on the host.
        longest: length of the longest sequence.
    """

    def __init__(self, cu_seqlens: torch.Tensor, bounds: Sequence[int], longest: int) -> None:
        super().__init__("thd", cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)
        self.bounds = tuple(bounds)


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Replaces Megatron's `DotProductAttention` in a layer spec.

    Without `packed_seq_params`: query [S, B, heads, d], key and value [S, B, groups, d] -> [S, B, heads * d]. With `packed_seq_params`,
    which must be `PackedSequences`: [T, heads, d] -> [T, heads * d], with T / n rows on each of n context-parallel ranks
    (`asyncmoe.platform.zigzag`); rows attend within their own sequence, so the cost is the sum of the squared lengths. Values may be
    narrower than keys, as in latent attention: they are padded with zeros, because only the kernel that stores all scores supports
    narrower values on every device.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout or attention_dropout or config.window_size is not None:
            raise InvariantBroken("PackedAttention has no dropout or sliding window")
        self.scale = softmax_scale
        self._ranks: Any = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> torch.Tensor:
        if attention_bias is not None or attention_mask is not None:
            raise InvariantBroken("PackedAttention is causal only: it takes neither a mask nor a bias")
        width = value.shape[-1]
        if width < query.shape[-1]:
            value = F.pad(value, (0, query.shape[-1] - width))
        if packed_seq_params is None:
            if self._ranks is not None:
                raise InvariantBroken("context parallelism supports only packed sequences")
            return self._attend(query, key, value)[..., :width].flatten(2)
        bounds, rows = packed_seq_params.bounds, query.shape[0] * (1 if self._ranks is None else self._ranks.size())
        if bounds[0] != 0 or bounds[-1] != rows:
            raise InvariantBroken(f"cu_seqlens: got {bounds[0]} to {bounds[-1]}, expected 0 to {rows}, padding included")
        if self._ranks is not None:
            out = context_attention.attend(query, key, value, bounds, self.scale, self._ranks)
        elif kernel(query.device.type, query.dtype, query.shape[-1]) == "varlen":
            out = packed(query, key, value, packed_seq_params, self.scale)
        else:
            out = self._each(query, key, value, bounds)
        return out[..., :width].flatten(1)

    def _each(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
        """Attend within one sequence after another: [T, heads, d] -> [T, heads, d]."""
        sizes = [last - first for first, last in pairwise(bounds)]
        parts = zip(*(torch.split(x.unsqueeze(1), sizes) for x in (query, key, value)), strict=True)
        return torch.cat([self._attend(*part) for part in parts]).squeeze(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[S, B, heads, d] -> [S, B, heads, d]."""
        dtype = query.dtype
        if query.device.type == "cpu" and dtype == torch.bfloat16 and query.shape[0] < _SHORT:
            query, key, value = query.float(), key.float(), value.float()
        if query.device.type == "cuda" and query.dtype == torch.float32:
            # Among torch's float32 kernels on a GPU, only the one that stores all scores supports grouped queries.
            key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
        return out.to(dtype).permute(2, 0, 1, 3)


def kernel(device: str, dtype: torch.dtype, width: int) -> Kernel:
    """Return the kernel for packed sequences: "varlen", flash attention over all of them at once (torch has it for 16-bit dtypes on GPUs),
    or "each", torch's choice of kernel for one sequence after another."""
    flash = device == "cuda" and dtype in (torch.bfloat16, torch.float16) and width <= _FLASH_HEAD and width % 8 == 0
    return "varlen" if flash and {"scale", "window_size"} <= arguments() else "each"


@cache
def arguments() -> frozenset[str]:
    """Return the arguments of torch's flash attention over packed sequences; none if there is no such function."""
    try:
        return frozenset(signature(varlen()).parameters)
    except ImportError:  # torch before 2.10
        return frozenset()


@cache
def varlen() -> Callable[..., Any]:
    """Return torch's flash attention over packed sequences. Imported late: its module takes a second to import torch's compiler."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: PackedSeqParams, scale: float | None) -> torch.Tensor:
    """query [T, heads, d], key and value [T, groups, d] -> [T, heads, d]."""
    grouped: dict[str, Any] = {}
    if "enable_gqa" in arguments():
        grouped["enable_gqa"] = query.shape[1] != key.shape[1]
    else:  # torch 2.11 requires as many keys as queries
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    made: Any = varlen()(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        sequences.cu_seqlens_q,
        sequences.cu_seqlens_kv,
        sequences.max_seqlen_q,
        sequences.max_seqlen_kv,
        scale=scale,
        window_size=(-1, 0),  # causal
        **grouped,
    )
    out: torch.Tensor = made
    return out
