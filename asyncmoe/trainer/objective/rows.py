"""The inputs of an objective, and finite arithmetic over them: by row, and by sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

Sums = dict[str, torch.Tensor]
"""Named sums over rows, added over micro-batches and ranks. Names starting with "max_" are maxima, -1 without values."""

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to plus or minus this limit before `exp`: e^20 = 4.9e8 stays finite in float32 after products with advantages and
sums over rows, and any clip, cap or band acts long before. Beyond it a row's gradient is zero."""

LOGPROB_LIMIT = 1e4
"""Log-probabilities are clamped to plus or minus this limit, so that impossible tokens (-inf) have finite differences. Beyond it a row's
gradient is zero."""


@dataclass(frozen=True)
class Rows:
    """One micro-batch as a policy loss sees it: flat over T rows, each about one token (`batch.MicroBatch`).

    Sequences are complete, or `over_ranks` completes sums over them. Values in rows outside `mask` are ignored, even NaN; a NaN inside
    `mask` makes the loss NaN.
    """

    mask: torch.Tensor
    """bool[T]; True if the token was sampled."""
    weights: torch.Tensor
    """float32[T]; planned weight of the row in the step's loss (`token_weights`)."""
    advantages: torch.Tensor
    """float32[T]"""
    behaviour: torch.Tensor
    """float32[T]; log-probability of the token when it was sampled."""
    versions: torch.Tensor
    """int[T]; version of the weights that sampled the token."""
    pure: torch.Tensor
    """bool[T]; True if that version computed the whole trajectory, keys and values included."""
    segments: torch.Tensor
    """int64[T]; number of the row's sequence in the micro-batch, -1 for padding (`segments`)."""
    sequences: int
    """Number of sequences."""
    proximal: torch.Tensor | None = None
    """float32[T]; log-probability under the trainer before the batch's first update. None: not computed (see `proximal_logprobs`)."""
    reference: torch.Tensor | None = None
    """float32[T]; log-probability under the reference policy. None: there is no reference policy."""
    over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Adds a tensor up over the context-parallel ranks, which hold parts of every sequence; differentiable. None: this rank holds whole
    sequences."""

    def clamped(self) -> Rows:
        """Return a copy with zeros outside `mask` and log-probabilities clamped to `LOGPROB_LIMIT`."""
        return replace(
            self,
            weights=torch.where(self.mask, self.weights, 0.0),
            advantages=torch.where(self.mask, self.advantages, 0.0),
            behaviour=clamped(self.behaviour, self.mask),
            proximal=None if self.proximal is None else clamped(self.proximal, self.mask),
            reference=None if self.reference is None else clamped(self.reference, self.mask),
        )

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` [T] over the sampled rows of each sequence: float64[sequences + 1]; the last entry, for padding, is 0."""
        total = torch.zeros(self.sequences + 1, dtype=torch.float64, device=values.device)
        total = total.index_add_(0, self._places, torch.where(self.mask, values, 0).double())
        return total if self.over_ranks is None else self.over_ranks(total)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Average `values` [T] over the sampled rows of each sequence, rejected or not: float64[sequences + 1]; 0 without sampled rows."""
        return self.sum(values) / self.sum(torch.ones_like(values)).clamp(min=1)

    def spread(self, each: torch.Tensor) -> torch.Tensor:
        """Return the value of each row's sequence: [sequences + 1] -> [T]."""
        return each[self._places]

    @property
    def _places(self) -> torch.Tensor:
        return torch.where(self.segments < 0, self.sequences, self.segments)


@dataclass(frozen=True, kw_only=True)
class PolicyRows(Rows):
    """`Rows` with the trainer's policy and the proximal policy: the input of a loss or an importance weight of the user's own.

    Every tensor is on the rank's device and has zeros outside `mask`, except `versions` and `segments`; log-probabilities are within
    `LOGPROB_LIMIT`.
    """

    logprobs: torch.Tensor
    """float32[T]; log-probability of the token under the trainer's current weights; with gradient for a loss, without for a weight."""
    proximal: torch.Tensor
    """float32[T]; log-probability under `objective.proximal`'s policy, without gradient."""
    version: int
    """Version of the trainer's weights before the batch's first update."""

    @property
    def ages(self) -> torch.Tensor:
        """int[T]; age of each token in versions; meaningless outside `mask`."""
        return self.version - self.versions

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}


def segments(lengths: Sequence[int], rows: int) -> torch.Tensor:
    """Return the sequence number of each row, for consecutive sequences of these lengths: int64[rows]; -1 for the remaining rows."""
    out = np.full(rows, -1, np.int64)
    out[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    return torch.from_numpy(out)


def clamped(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Clamp log-probabilities [T] to `LOGPROB_LIMIT` and zero them outside `mask`; a NaN inside `mask` stays."""
    return torch.where(mask, logprobs, 0.0).clamp(-LOGPROB_LIMIT, LOGPROB_LIMIT)


def exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return the ratio for a log-ratio, clamped to `LOG_RATIO_LIMIT` first."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
