"""What an objective looks at, and arithmetic over it that stays finite: by row, and by sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

Sums = dict[str, torch.Tensor]
"""Named sums over rows, added over micro-batches and ranks. Names that start with "max_" are maxima, -1 where there was none."""

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within it before `exp`: e^20 = 4.9e8 is finite in float32 after products with advantages and sums over rows, and
any clip, cap or band acts long before. Past it a row's gradient is zero."""

LOGPROB_LIMIT = 1e4
"""Log-probabilities are held within it, so that those of impossible tokens (-inf) have finite differences. Past it a row's gradient is
zero."""


@dataclass(frozen=True)
class Rows:
    """One micro-batch as a policy loss sees it: flat over T rows, each about one token (`batch.MicroBatch`).

    A sequence is whole. Whatever stands in a row outside `mask` is ignored, be it NaN; a NaN inside makes the loss NaN.
    """

    mask: torch.Tensor
    """bool[T]; the token was sampled."""
    weights: torch.Tensor
    """float32[T]; what the row was planned to count for in the loss of the step (`token_weights`)."""
    advantages: torch.Tensor
    """float32[T]"""
    behaviour: torch.Tensor
    """float32[T]; log-probability when it was sampled."""
    versions: torch.Tensor
    """int[T]; version of the weights that sampled it."""
    pure: torch.Tensor
    """bool[T]; the whole trajectory, its keys and values included, comes from that version."""
    segments: torch.Tensor
    """int64[T]; which sequence of the micro-batch the row belongs to, -1 for padding (`segments`)."""
    sequences: int
    """How many there are."""
    proximal: torch.Tensor | None = None
    """float32[T]; log-probability under the trainer before the batch's first update. None: this is the first update."""
    reference: torch.Tensor | None = None
    """float32[T]; log-probability under the reference policy. None: there is none."""

    def held(self) -> Rows:
        """The same with zeros outside `mask` and log-probabilities within `LOGPROB_LIMIT`."""
        return replace(
            self,
            weights=torch.where(self.mask, self.weights, 0.0),
            advantages=torch.where(self.mask, self.advantages, 0.0),
            behaviour=held(self.behaviour, self.mask),
            proximal=None if self.proximal is None else held(self.proximal, self.mask),
            reference=None if self.reference is None else held(self.reference, self.mask),
        )

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """float64[sequences + 1]: the sum of `values` [T] over the sampled rows of each sequence; the last is padding's, 0."""
        total = torch.zeros(self.sequences + 1, dtype=torch.float64, device=values.device)
        return total.index_add_(0, self._places, torch.where(self.mask, values, 0).double())

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """float64[sequences + 1]: the mean over the sampled rows of each sequence, all of them, rejected or not; 0 where there are none."""
        return self.sum(values) / self.sum(torch.ones_like(values)).clamp(min=1)

    def spread(self, each: torch.Tensor) -> torch.Tensor:
        """[T]: the value of each row's sequence, from [sequences + 1]."""
        return each[self._places]

    @property
    def _places(self) -> torch.Tensor:
        return torch.where(self.segments < 0, self.sequences, self.segments)


def segments(lengths: Sequence[int], rows: int) -> torch.Tensor:
    """int64[rows]: which sequence each row belongs to when sequences of these lengths lie one after the other, and -1 for what is left."""
    out = np.full(rows, -1, np.int64)
    out[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    return torch.from_numpy(out)


def held(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [T] within `LOGPROB_LIMIT`, 0 outside `mask`; NaN inside it stays."""
    return torch.where(mask, logprobs, 0.0).clamp(-LOGPROB_LIMIT, LOGPROB_LIMIT)


def exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """The ratio of a log-ratio held within `LOG_RATIO_LIMIT`."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
