"""Causal attention over packed sequences whose rows are divided among context-parallel ranks (`asyncmoe.platform.zigzag`), on CPUs.

A rank gathers the keys and values of all ranks, in float32, and attends with its own queries. On GPUs Transformer Engine does this without
storing all keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from asyncmoe.platform import zigzag


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Sequence[int],
    scale: float | None,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """query [T / n, heads, d], key and value [T / n, groups, d] -> [T / n, heads, d]. Collective over the n ranks of `group`, also in the
    backward pass.

    Args:
        bounds: starts of the sequences among all T rows, then T.
        scale: scale of the scores; None: 1 / sqrt(d).
    """
    held = torch.cat([zigzag.rows(bounds, group.size(), rank) for rank in range(group.size())])
    keys, values = (_every_row(x, held.argsort(), group) for x in (key, value))
    made = []
    for chunk in zigzag.chunks(bounds, group.size(), group.rank()):
        mine, last = query[chunk.here : chunk.here + chunk.rows].float(), chunk.first + chunk.rows
        q, k, v = (x.transpose(0, 1)[None] for x in (mine, keys[chunk.begin : last], values[chunk.begin : last]))
        seen = torch.ones(chunk.rows, last - chunk.begin, dtype=torch.bool).tril(chunk.first - chunk.begin)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        made.append(out[0].transpose(0, 1))
    return torch.cat(made).to(query.dtype)


def _every_row(mine: torch.Tensor, order: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather [T / n, ...] -> float32 [T, ...], in the order of all rows; `order`: each row's index among the concatenated ranks' rows."""
    gathered: torch.Tensor = gather_from_sequence_parallel_region(mine.float(), group=group)
    return gathered.index_select(0, order)
