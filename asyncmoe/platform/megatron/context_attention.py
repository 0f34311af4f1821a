"""Causal attention over packed sequences whose rows are divided among context-parallel ranks (`asyncmoe.platform.zigzag`), on CPUs.

A rank gathers the keys and values of all ranks and attends with its own queries: a chunk to the rows before it, all of them, and to itself,
causally. Two outputs over disjoint keys are merged by their log-sum-exps (Milakov and Gimelshein, arXiv 1805.02867; Ring Attention, arXiv
2310.01889). The backward pass gathers again, so that a rank keeps its own rows only, and never stores scores. On GPUs Transformer Engine
does this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

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
        scale: of the scores; None: 1 / sqrt(d).
    """
    made: torch.Tensor = _Attention.apply(query, key, value, tuple(bounds), scale, group)  # type: ignore[no-untyped-call]
    return made


@dataclass(frozen=True)
class _Block:
    """Queries `rows` of a rank attend to keys `keys` of all ranks' rows."""

    rows: slice
    keys: slice
    causal: bool


def _blocks(bounds: Sequence[int], group: dist.ProcessGroup) -> Iterator[_Block]:
    for chunk in zigzag.chunks(bounds, group.size(), group.rank()):
        mine = slice(chunk.here, chunk.here + chunk.rows)
        yield _Block(mine, slice(chunk.first, chunk.first + chunk.rows), True)
        if chunk.first > chunk.begin:
            yield _Block(mine, slice(chunk.begin, chunk.first), False)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bounds: tuple[int, ...],
        scale: float | None,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        q, groups = _split(query.float(), key.shape[1]), key.shape[1]
        keys, values = (_gathered(x, bounds, group) for x in (key, value))
        out, log_sum = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
        for block in _blocks(bounds, group):
            k, v = (_shared(x[block.keys], q.shape[1]) for x in (keys, values))
            found, found_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[:, :, block.rows], k, v, 0.0, block.causal, attn_mask=None, scale=scale
            )
            before = log_sum[:, :, block.rows]
            both = torch.logaddexp(before, found_sum)
            kept, added = ((x - both).exp()[..., None] for x in (before, found_sum))
            out[:, :, block.rows] = out[:, :, block.rows] * kept + found * added
            log_sum[:, :, block.rows] = both
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.bounds, ctx.scale, ctx.group, ctx.groups = bounds, scale, group, groups
        return _joined(out).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, log_sum = ctx.saved_tensors
        q, above = (_split(x.float(), ctx.groups) for x in (query, gradients[0]))
        keys, values = (_gathered(x, ctx.bounds, ctx.group) for x in (key, value))
        of_query, of_keys, of_values = torch.zeros_like(q), torch.zeros_like(keys), torch.zeros_like(values)
        for block in _blocks(ctx.bounds, ctx.group):
            k, v = (_shared(x[block.keys], q.shape[1]) for x in (keys, values))
            rows = (slice(None), slice(None), block.rows)
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                above[rows], q[rows], k, v, out[rows], log_sum[rows], 0.0, block.causal, attn_mask=None, scale=ctx.scale
            )
            of_query[rows] += found[0]
            for total, part in ((of_keys, found[1]), (of_values, found[2])):
                total[block.keys] += part.sum(1).transpose(0, 1)
        of_key, of_value = (_returned(x, ctx.bounds, ctx.group).to(key.dtype) for x in (of_keys, of_values))
        return _joined(of_query).to(query.dtype), of_key, of_value, None, None, None


def _split(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """[T, heads, d] -> [groups, heads / groups, T, d]."""
    return rows.reshape(rows.shape[0], groups, -1, rows.shape[-1]).permute(1, 2, 0, 3).contiguous()


def _joined(rows: torch.Tensor) -> torch.Tensor:
    """[groups, heads / groups, T, d] -> [T, heads, d]."""
    return rows.permute(2, 0, 1, 3).flatten(1, 2).contiguous()


def _shared(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """[T, groups, d] -> [groups, heads, T, d], without a copy."""
    return rows.transpose(0, 1)[:, None].expand(-1, heads, -1, -1)


def _order(bounds: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Return int64[T]: the number among all rows of each row of the first rank, the second, ..."""
    return torch.cat([zigzag.rows(bounds, group.size(), rank) for rank in range(group.size())])


def _gathered(mine: torch.Tensor, bounds: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """[T / n, ...] -> float32 [T, ...], in the order of all rows."""
    every = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(every, mine.contiguous(), group=group)
    found = torch.empty(bounds[-1], *mine.shape[1:])
    return found.index_copy_(0, _order(bounds, group), torch.cat(every).float())


def _returned(every: torch.Tensor, bounds: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Sum [T, ...] over the ranks -> [T / n, ...], each rank its own rows."""
    parts = every.index_select(0, _order(bounds, group))
    got = torch.empty_like(parts)
    dist.all_to_all_single(got, parts, group=group)
    return got.reshape(group.size(), -1, *got.shape[1:]).sum(0)
