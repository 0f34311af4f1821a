"""What lowers the memory that a GPU has to hold: configuration keys by the part of the sum that they govern. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_LARGE = 0.25
"""Share of the sum from which a part counts as one that dominates."""
_TRAINER: Mapping[str, str] = {
    "weights": "more trainer.ranks with a larger trainer.tp, ep or pp",
    "gradients": "more trainer.ranks with a larger trainer.tp, ep or pp",
    "optimizer": "trainer.memory.optimizer_offload, or more trainer.ranks (trainer.optimizer.distributed shards its state)",
    "reference": "objective.kl.coefficient=0",
    "activations": "trainer.recompute=full",
    "working set": "fewer trainer.tokens_per_microbatch",
    "weight sync": "a smaller sync.bucket_bytes",
}
_ENGINE: Mapping[str, str] = {
    "weights": "a larger engines.tp on more GPUs",
    "KV cache": "fewer tokens (engines.max_total_tokens, environment.max_tokens)",
    "working set": "a smaller --chunked-prefill-size in engines.args",
    "weight sync": "a smaller sync.bucket_bytes",
}


def of_trainer(parts: Mapping[str, int], besides: int = 0) -> tuple[str, ...]:
    """What to change, the largest part's first, and of equal ones that which costs least; () where the parts are not known.

    Args:
        parts: bytes by the names of `asyncmoe.plan.memory.trainer`.
        besides: bytes of another process on the same GPU.
    """
    return _governing(parts, besides, _TRAINER)


def of_engine(parts: Mapping[str, int], besides: int = 0) -> tuple[str, ...]:
    """The same of an engine's GPU, with the names of `asyncmoe.plan.memory.engine`."""
    return _governing(parts, besides, _ENGINE)


def joined(dominating: Sequence[str], usual: Sequence[str]) -> tuple[str, ...]:
    """Ways to need less memory: those of the parts that dominate, unless the usual ones name the same keys, then the usual ones."""
    known = frozenset().union(*map(_keys, usual))
    return (*(way for way in dict.fromkeys(dominating) if not _keys(way) <= known), *usual)


def _keys(way: str) -> frozenset[str]:
    """The configuration keys that a way names."""
    return frozenset(re.findall(r"[a-z]+\.[a-z_.]+", way))


def _governing(parts: Mapping[str, int], besides: int, keys: Mapping[str, str]) -> tuple[str, ...]:
    least = max(1.0, _LARGE * (sum(parts.values()) + besides))
    large = sorted((name for name in keys if parts.get(name, 0) >= least), key=lambda name: -parts[name])
    return tuple(dict.fromkeys(keys[name] for name in large))
