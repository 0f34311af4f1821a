"""Off-policy correction: reweights or rejects tokens that other policies sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from asyncmoe.config.objective import Band, CorrectionSection, ObjectiveSection
from asyncmoe.trainer.objective.rows import Rows, exp

RULES = ("token_band", "sequence_band", "geometric_band", "veto", "opsm", "max_age")
"""The rejection rules, in the order of `Fates.rejected`."""


@dataclass(frozen=True)
class Fates:
    """The fates of a micro-batch's T rows, without gradients; values outside the mask mean nothing.

    Attributes:
        logprobs: float32[T]; log-probability under the trainer's policy.
        weight: float32[T]; the correction's weight, which multiplies the row's loss.
        kept: bool[T]; True if the row is trained on.
        cut: bool[T]; True if the clip acts on it.
        capped: bool[T]; True if the cap reduced the weight.
        rejected: bool[len(RULES), T]; True if the rule, on its own, rejects it.
    """

    logprobs: torch.Tensor
    weight: torch.Tensor
    kept: torch.Tensor
    cut: torch.Tensor
    capped: torch.Tensor
    rejected: torch.Tensor


def correct(
    new: torch.Tensor,
    old: torch.Tensor,
    rows: Rows,
    section: ObjectiveSection,
    version: int,
    cut: torch.Tensor,
    own: torch.Tensor | None = None,
) -> Fates:
    """Weight or reject every sampled token. A token is trained on if no rule rejects it and its weight is not 0.

    The ratio is rho = pi_prox / pi_b, which the clipped ratio does not cover; with proximal: behaviour, where pi_prox / pi_b is 1, the
    ratio is w = pi / pi_b and only rejects tokens (the configuration refuses weights, because w would count twice). Sequence ratios are
    over all sampled tokens, rejected or not. Below, "outside" means outside the rule's band:
        weight          rho, or the product over the sequence; min(weight, cap)     TIS, Yao et al. 2025, "Your efficient RL framework
                        secretly brings you off-policy RL training"; by sequence: Liu, Li et al. 2025, "When speed kills stability"
        token_band      rho outside                                  IcePop, arXiv 2510.18855; MIS
        sequence_band   product of the sequence's rho outside        MIS by sequence
        geometric_band  geometric mean of the sequence's rho outside
        veto            any rho of the sequence outside
        opsm            A < 0 and mean(log pi_b - log pi) > delta    DeepSeek-V3.2, arXiv 2512.02556, sec. 3.1
        max_age         version - v_b > max_age
    A is the token's own advantage: if steps or a teacher add to it, opsm rejects only those tokens of a sequence that have A < 0.
    Bands are inclusive. An infinite ratio counts as large, not as NaN: it is capped or outside. A NaN is never outside, so it reaches the
    loss. Weights are not divided by their mean over the batch: that would need all ranks' ratios before any gradient.

    Args:
        new, old: float32[T] without gradient, from `clamped`; log-probabilities of the trainer and of the proximal policy.
        rows: from `Rows.clamped`.
        version: weight version before the batch's first update.
        cut: bool[T]; see `Fates`.
        own: float64[T]; the user's own weights, not yet capped; required if `section` names any.
    """
    rule = section.correction
    behaviour = rows.behaviour.double()
    log_ratio = (new if section.proximal == "behaviour" else old).double() - behaviour
    product = rows.sum(log_ratio)
    never = torch.zeros_like(rows.mask)

    if own is None:
        own = exp({"token": log_ratio, "sequence": rows.spread(product), "none": torch.zeros_like(log_ratio)}[rule.weight])
    weight, capped = own, never
    if rule.cap is not None and rule.weight != "none":
        capped = (weight > rule.cap) & rows.mask
        weight = weight.clamp(max=rule.cap)

    outside = _outside(log_ratio, rule.veto)
    rejected = {
        "token_band": _outside(log_ratio, rule.token_band),
        "sequence_band": rows.spread(_outside(product, rule.sequence_band)),
        "geometric_band": rows.spread(_outside(rows.mean(log_ratio), rule.geometric_band)),
        "veto": rows.spread(rows.sum(outside) > 0),
        "opsm": never,
        "max_age": never if rule.max_age is None else version - rows.versions > rule.max_age,
    }
    if rule.opsm_delta is not None:
        drifted = rows.mean(behaviour - new.double()) > rule.opsm_delta
        rejected["opsm"] = (rows.advantages < 0) & rows.spread(drifted)
    each = torch.stack([rejected[name] & rows.mask for name in RULES])
    return Fates(new.detach(), weight.to(new.dtype), rows.mask & ~each.any(dim=0) & (own != 0), cut, capped, each)


def token_weight(log_ratio: torch.Tensor, rule: CorrectionSection) -> torch.Tensor:
    """Return the weight that `correct` gives a token with this log-ratio, at weight token or none; 0 if the token band rejects it."""
    weight = torch.ones_like(log_ratio) if rule.weight == "none" else exp(log_ratio).clamp(max=rule.cap or math.inf)
    return torch.where(_outside(log_ratio, rule.token_band), 0.0, weight)


def _outside(log_ratio: torch.Tensor, band: Band | None) -> torch.Tensor:
    """Return bool: True if the ratio is below or above `band`."""
    if band is None:
        return torch.zeros_like(log_ratio, dtype=torch.bool)
    low = math.log(band[0]) if band[0] > 0 else -math.inf
    return (log_ratio < low) | (log_ratio > math.log(band[1]))
