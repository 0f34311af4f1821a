"""Worker: attention of context-parallel ranks against torch's over whole sequences. `context.py RESULT CASES`"""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from asyncmoe.platform import megatron, zigzag
from tests.ranks import group

megatron.prepare()

from asyncmoe.platform.megatron.context_attention import attend  # noqa: E402


def main(cases: str) -> list[dict[str, float]]:
    return [case for errors in group.everyone([one(seed) for seed in range(int(cases))]) for case in errors]


def one(seed: int) -> dict[str, float]:
    """Errors of the output and of the gradients, relative to the largest element; sizes, lengths, grouping and scale are drawn."""
    rng, group = np.random.default_rng(seed), dist.group.WORLD
    lengths, groups, per_group, width = rng.integers(1, 50, rng.integers(1, 5)), *rng.integers(1, 4, 2), 8 * rng.integers(1, 4)
    scale = None if seed % 2 else float(rng.uniform(0.05, 0.5))
    bounds = [0, *accumulate(zigzag.padded(int(length), group.size()) for length in lengths)]
    made = torch.Generator().manual_seed(seed)
    q, k, v, above = (
        torch.randn(bounds[-1], heads, int(width), generator=made, requires_grad=True)
        for heads in map(int, (groups * per_group, groups, groups, groups * per_group))
    )
    whole = torch.cat([by_definition(q[a:b], k[a:b], v[a:b], scale) for a, b in pairwise(bounds)])
    wanted = torch.autograd.grad(whole, (q, k, v), above)
    mine = zigzag.rows(bounds, group.size(), group.rank())
    parts = [x.detach()[mine].requires_grad_() for x in (q, k, v)]
    out = attend(*parts, bounds, scale, group)
    found = torch.autograd.grad(out, parts, above[mine])
    names = ("out", "query", "key", "value")
    pairs = zip(names, (out, *found), (whole, *wanted), strict=True)
    return {name: float((got - want[mine]).abs().max() / want.abs().max()) for name, got, want in pairs}


def by_definition(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Scores written out. [T, heads, d] -> [T, heads, d]"""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("shd,thd->hst", query, key) * (scale or query.shape[-1] ** -0.5)
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hst,thd->shd", F.softmax(scores.masked_fill(future, -torch.inf), dim=-1), value)


if __name__ == "__main__":
    group.run(main)
