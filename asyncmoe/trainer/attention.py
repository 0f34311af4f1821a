"""Core attention for the local spec: causal, grouped queries, packed sequences.

Megatron's own local attention asserts that there are no packed sequences, and builds the full matrix of scores.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

from asyncmoe.errors import InvariantBroken


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Takes the place of Megatron's `DotProductAttention` in a layer spec.

    Without `packed_seq_params`: query [S, B, heads, d], key and value [S, B, groups, d] -> [S, B, heads * d]. With them (format "thd"):
    [T, heads, d] -> [T, heads * d]; rows attend within their own sequence, each block a causal call, so the cost is the sum of the
    squares of the lengths.
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
        if config.context_parallel_size != 1 or config.attention_dropout or attention_dropout or config.window_size is not None:
            raise InvariantBroken("PackedAttention has no context parallelism, dropout or sliding window")
        self.scale = softmax_scale

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
        if packed_seq_params is None:
            return self._attend(query, key, value)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        if bounds[0] != 0 or bounds[-1] != query.shape[0]:
            raise InvariantBroken(f"cu_seqlens: got {bounds[0]} to {bounds[-1]}, expected 0 to {query.shape[0]}, padding included")
        blocks = [self._attend(query[a:b, None], key[a:b, None], value[a:b, None])[:, 0] for a, b in pairwise(bounds)]
        return torch.cat(blocks)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
        return out.permute(2, 0, 1, 3).flatten(2)
