"""What is gained if context-parallel ranks leave short sequences whole (dynamic context parallelism). Arithmetic, no run.

A micro-batch of a group of n ranks takes, in one layer forward and backward, what its slowest rank computes, and the time in which keys and
values of the rows that are split travel. Split evenly, every rank computes 1/n of every sequence. Left whole, a sequence is computed by one
rank, and its keys and values do not travel; the longest sequences of a micro-batch are still split, as evenly as possible.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from asyncmoe.models import family_of
from asyncmoe.models.cost import attention_width
from asyncmoe.models.latent import Latent
from asyncmoe.models.shape import Shape
from asyncmoe.trainer.data.schedule import BatchGrid, schedule
from benchmarks.provenance import here
from benchmarks.published import REAL

MODELS = ("Qwen3-30B-A3B", "Qwen3-235B-A22B", "DeepSeek-V3")
LENGTHS = {"answers": (2_000, 1.0, 32_768), "agents": (8_000, 1.4, 131_072)}
"""Median, sigma of the logarithm, and the longest: tokens."""
LINKS = {"NVLink": 300e9, "InfiniBand": 45e9}
"""Bytes a second that a GPU sends while it receives as many: what collectives reach of 450 and 50 GB/s."""
RANKS = (2, 8)
TP, DP, TRAJECTORIES, SEED = 4, 4, 1_024, 0
FLOPS = 400e12
"""Of a GPU on bfloat16 matrices, a second: 40 % of an H100's peak."""
PASSES = 3
"""Keys and values travel forward, and backward again, together with their gradients."""
HIDDEN = {"waited for": 0.0, "behind attention": 1.0}
"""The share of attention's computation that hides the transfer: 0 for one gather, as on CPUs; 1 for Transformer Engine's ring."""


@dataclass(frozen=True)
class Rates:
    """Of one rank and all layers: seconds of a token's matrices, of a pair of tokens' attention (half of s * s pairs are causal; counted in
    `cost` as s * s), and of the passage of a token's keys and values."""

    token: float
    pair: float
    passage: float


def rates(m: Shape, link: float) -> Rates:
    """Return the rates of a model on `TP` ranks, for a forward and a backward pass, which is two forward passes more."""
    latent = m.attention if isinstance(m.attention, Latent) else None
    key, value = (latent.nope + latent.rope, latent.value) if latent else (m.head_dim, m.head_dim)
    pair = 3 * m.layers * m.heads * (key + value) / TP / FLOPS
    heads = m.heads if latent else max(m.kv_heads, TP)
    return Rates(pair * attention_width(m), pair, PASSES * m.layers * heads * (key + value) * 2 / TP / link)


def split(lengths: Sequence[int], ranks: int, r: Rates, hidden: float) -> float:
    """Return the seconds of a micro-batch whose sequences are all split."""
    return _seconds(_work(lengths, r) / ranks, r.pair * sum(n * n for n in lengths) / ranks, sum(lengths), ranks, r, hidden)


def dynamic(lengths: Sequence[int], ranks: int, r: Rates, hidden: float) -> float:
    """Return the seconds of a micro-batch of which the best number of sequences is split, the longest first.

    The others are dealt to the ranks, the most expensive first, each to the rank that has least to do."""
    ordered = sorted(lengths, reverse=True)
    found = []
    for whole in range(len(ordered) + 1):
        first, rest = ordered[:whole], ordered[whole:]
        loads = [0.0] * ranks
        for n in rest:
            heapq.heapreplace(loads, loads[0] + _work([n], r))
        attention = r.pair * sum(n * n for n in first) / ranks
        found.append(_seconds(max(loads) + _work(first, r) / ranks, attention, sum(first), ranks, r, hidden))
    return min(found)


def _work(lengths: Sequence[int], r: Rates) -> float:
    return r.token * sum(lengths) + r.pair * sum(n * n for n in lengths)


def _seconds(work: float, attention: float, rows: int, ranks: int, r: Rates, hidden: float) -> float:
    passage = r.passage * rows * (ranks - 1) / ranks
    return work + passage - hidden * min(passage, attention)


def run() -> dict[str, Any]:
    """Return {"date", "machine", "cases"}; a case has "model", "lengths", "link", "ranks" (of context parallelism), "transfer" (how, a key
    of `HIDDEN`), "passing" (the share of a step in which ranks wait for keys and values if all is split), and "gain" (the seconds of a step
    if all is split over those if short sequences stay whole)."""
    keys = product(MODELS, LENGTHS, LINKS, RANKS, HIDDEN)
    return {**here(), "cases": [_case(*key) for key in keys]}


def _case(model: str, kind: str, link: str, ranks: int, transfer: str) -> dict[str, Any]:
    hf = REAL[model]
    m = family_of(hf).shape_of(hf)
    r, hidden = rates(m, LINKS[link]), HIDDEN[transfer]
    median, sigma, longest = LENGTHS[kind]
    drawn = np.random.default_rng(SEED).lognormal(np.log(median), sigma, TRAJECTORIES)
    lengths = np.clip(drawn, 16, longest).astype(int).tolist()
    bound, width = max(longest, ranks * 16_384), attention_width(m)
    made = schedule(lengths, DP, bound, True, BatchGrid(TP, 1, ranks), width)
    # Expert all-to-alls make the m-th micro-batches of all ranks wait for each other.
    rounds = [[[lengths[i] for i in rank[number]] for rank in made.ranks] for number in range(made.microbatches)]
    totals = {way.__name__: sum(max(way(one, ranks, r, hidden) for one in each) for each in rounds) for way in (split, dynamic)}
    without = sum(max(_work(one, r) / ranks for one in each) for each in rounds)
    return {
        "model": model,
        "lengths": kind,
        "link": link,
        "ranks": ranks,
        "transfer": transfer,
        "passing": 1 - without / totals["split"],
        "gain": totals["split"] / totals["dynamic"],
    }


def table(results: Mapping[str, Any]) -> str:
    """One line a case, "passing" and "gain"."""
    lines = [f"{'':<17}{'lengths':<9}{'over':<12}{'cp':>3}  {'keys and values':<18}{'waiting':>8}{'gain':>7}"]
    for one in results["cases"]:
        name = f"{one['model']:<17}{one['lengths']:<9}{one['link']:<12}{one['ranks']:>3}  {one['transfer']:<18}"
        lines.append(f"{name}{one['passing']:>8.1%}{one['gain']:>7.3f}")
    return "\n".join(lines)
