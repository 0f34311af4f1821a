"""What a policy loss did with each row, for those who look at single tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Fates:
    """The fates of a micro-batch's T rows, without gradients; values outside the mask mean nothing.

    Attributes:
        logprobs, proximal: float32[T]; log-probability under the trainer's policy and under the proximal policy.
        weight: float32[T]; the correction's weight.
        kept: bool[T]; True if the row is trained on.
        cut: bool[T]; True if the clip acts on it.
        capped: bool[T]; True if the cap reduced the weight.
        rejected: bool[len(correction.RULES), T]; True if the rule rejects it.
    """

    logprobs: torch.Tensor
    proximal: torch.Tensor
    weight: torch.Tensor
    kept: torch.Tensor
    cut: torch.Tensor
    capped: torch.Tensor
    rejected: torch.Tensor
