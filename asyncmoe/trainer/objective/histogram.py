"""Quantiles of log-ratios from counts in fixed bins, which can be added over micro-batches and ranks.

The bins of |log-ratio| grow by 10^(1/32) = 7.5 % from 1e-6 to 20, on both sides of one bin for values closer to 0. A bin's value is the
geometric mean of its edges, so a quantile's log-ratio has a relative error of at most 3.7 % (absolute 1e-6 near 0): a ratio of 1.01 is off
by at most 0.0004, a ratio of 2 by 0.05. Values beyond 20 count as 20.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from asyncmoe.trainer.objective.rows import LOG_RATIO_LIMIT

_PER_DECADE = 32
_SMALLEST = 1e-6
_DECADES = math.log10(LOG_RATIO_LIMIT / _SMALLEST)
_EDGES = _SMALLEST * 10.0 ** (np.arange(math.ceil(_DECADES * _PER_DECADE)) / _PER_DECADE)
"""Lower edges of the bins above 0, ascending; the last bin extends beyond 20."""
BINS = 2 * len(_EDGES) + 1


def counts(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Count the log-ratios of the rows in `mask` by bin, from lowest to highest: float64[BINS]."""
    edges = torch.from_numpy(_EDGES).to(log_ratio.device)
    place = torch.bucketize(torch.where(mask, log_ratio, 0.0).abs().double(), edges, right=True)
    index = len(_EDGES) + torch.where(log_ratio < 0, -place, place)
    return torch.zeros(BINS, dtype=torch.float64, device=log_ratio.device).index_add_(0, index, mask.double())


def quantiles(histogram: np.ndarray, shares: Sequence[float]) -> list[float]:
    """Return the ratios (not their logarithms) below which the given shares of the rows lie; NaN without rows."""
    total = histogram.sum()
    if not total:
        return [math.nan] * len(shares)
    above = _EDGES * 10.0 ** (0.5 / _PER_DECADE)
    values = np.concatenate([-above[::-1], [0.0], above])
    places = np.searchsorted(np.cumsum(histogram), np.asarray(shares) * total, side="left")
    return [float(value) for value in np.exp(np.clip(values[np.minimum(places, BINS - 1)], -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))]
