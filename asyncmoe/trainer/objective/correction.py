"""What is done about tokens of another policy: weights for some, rejection of others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from asyncmoe.config.objective import Band, ObjectiveSection
from asyncmoe.trainer.objective.rows import Rows, exp

RULES = ("token_band", "sequence_band", "geometric_band", "veto", "opsm", "max_age")
"""Why tokens are rejected, in the order of `Correction.rejected`."""


@dataclass(frozen=True)
class Correction:
    """What becomes of each token; nothing here carries a gradient."""

    weight: torch.Tensor
    """float32[T]; its loss is multiplied by it."""
    capped: torch.Tensor
    """bool[T]; the weight would have been larger."""
    rejected: torch.Tensor
    """bool[len(RULES), T]; the rules that reject it, each on its own."""


def correct(new: torch.Tensor, old: torch.Tensor, rows: Rows, section: ObjectiveSection, version: int) -> Correction:
    """Judge every sampled token. Rules add up: a token is trained on if none rejects it.

    The ratio is rho = pi_prox / pi_b, of what the clipped ratio leaves; with proximal: behaviour, where nothing is left, w = pi / pi_b,
    which then only rejects (the configuration refuses weights, or w would count twice). Over sequences it is taken over all sampled
    tokens, whatever is rejected:
        weight          rho, or the product of the sequence's; min(weight, cap)     TIS, Yao et al. 2025, "Your efficient RL framework
                        secretly brings you off-policy RL training"; by sequence: Liu, Li et al. 2025, "When speed kills stability"
        token_band      rho outside                                  IcePop, arXiv 2510.18855; MIS
        sequence_band   product of the sequence's rho outside        MIS by sequence
        geometric_band  their geometric mean outside
        veto            any rho of the sequence outside
        opsm            A < 0 and mean(log pi_b - log pi) > delta    DeepSeek-V3.2, arXiv 2512.02556, sec. 3.1
        max_age         version - v_b > max_age
    A is the token's own: where steps or a teacher add to it, opsm rejects the tokens of a sequence at which it is negative.
    Bands are inclusive. An infinite ratio is large, not NaN: it is capped, or outside. A NaN is never outside, so that it reaches the loss.
    Weights are not divided by their mean over the batch: that would need all ranks' ratios before any gradient.

    Args:
        new, old: float32[T] without gradient, held; log-probabilities of the trainer and of the proximal policy.
        rows: held.
        version: of the trainer's weights before the batch's first update.
    """
    rule = section.correction
    behaviour = rows.behaviour.double()
    log_ratio = (new if section.proximal == "behaviour" else old).double() - behaviour
    product = rows.sum(log_ratio)
    never = torch.zeros_like(rows.mask)

    log_weight = {"token": log_ratio, "sequence": rows.spread(product), "none": torch.zeros_like(log_ratio)}[rule.weight]
    weight, capped = exp(log_weight), never
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
    return Correction(weight.to(new.dtype), capped, torch.stack([rejected[name] & rows.mask for name in RULES]))


def _outside(log_ratio: torch.Tensor, band: Band | None) -> torch.Tensor:
    """bool: the ratio is below or above `band`."""
    if band is None:
        return torch.zeros_like(log_ratio, dtype=torch.bool)
    low = math.log(band[0]) if band[0] > 0 else -math.inf
    return (log_ratio < low) | (log_ratio > math.log(band[1]))
