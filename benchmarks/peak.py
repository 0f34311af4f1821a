"""The most memory that a piece of work takes at once."""

from __future__ import annotations

import gc

import torch

from benchmarks.memory import Growth, give_back


class Peak:
    """Counts from its creation, without what there was before: a card's bytes in tensors; without a card, the process's resident bytes."""

    def __init__(self) -> None:
        gc.collect()
        self._growth: Growth | None = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            give_back()
            self._growth = Growth()

    @property
    def nbytes(self) -> int:
        return torch.cuda.max_memory_allocated() - self._before if self._growth is None else self._growth.peak_bytes()
