"""Token statistics of a step: sums over rows, and the figures computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from asyncmoe.trainer.objective.correction import RULES, Fates
from asyncmoe.trainer.objective.rows import Rows, Sums, exp
from asyncmoe.trainer.objective.surrogate import k3

AGES = 65
"""Number of age bins; the last bin also holds all higher ages."""

_NUMBERS = (
    *("tokens", "kept", "planned_weight", "kept_weight", "clipped", "tis_capped", "correction", "ratio", "ratio_squared"),
    *("kl", "kl_direct", "kl_reference", "referenced", "future"),
    *("logprob_diff", "same_version", "logprob_diff_same_version", "max_logprob_diff_same_version"),
)
SUMS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(_NUMBERS, ()),
    **{"rejected": (len(RULES),), "rejected_ages": (AGES,), "ages": (AGES,)},
}
"""Names and shapes of the float64 sums that `measure` returns, the same for every micro-batch."""


def measure(fates: Fates, compared: torch.Tensor, rows: Rows, weights: torch.Tensor, version: int) -> Sums:
    """Compute the sums declared in `SUMS` over the sampled rows of a micro-batch; `metrics` explains their use.

    Args:
        fates: the rows' fates; their log-probabilities are compared with the engine's.
        compared: float32[T], from `clamped`; log-probabilities to compare with the reference's.
        rows: from `Rows.clamped`.
        weights: float32[T]; row weights (`kept_weights`).
        version: the trainer's weight version.
    """
    mask, kept = rows.mask, fates.kept
    log_ratio = fates.logprobs.double() - rows.behaviour.double()
    ratio = exp(log_ratio)
    age = version - rows.versions
    same = rows.pure & mask & (age == 0)
    difference = torch.where(mask, log_ratio.abs(), 0.0)
    at = age.clamp(0, AGES - 1).long()
    reference = compared if rows.reference is None else rows.reference
    sums = {
        "tokens": mask.sum(),
        "kept": kept.sum(),
        "planned_weight": rows.weights.double().sum(),
        "kept_weight": weights.double().sum(),
        "clipped": (fates.cut & kept).sum(),
        "tis_capped": fates.capped.sum(),
        "correction": torch.where(kept, fates.weight, 0.0).double().sum(),
        "ratio": (ratio * mask).sum(),
        "ratio_squared": (ratio**2 * mask).sum(),
        "kl": k3(log_ratio).sum(),
        "kl_direct": -log_ratio.sum(),
        "kl_reference": k3(reference.double() - compared.double()).sum(),
        "referenced": mask.sum() * (rows.reference is not None),
        "rejected": fates.rejected.sum(dim=1),
        "rejected_ages": _count(at, mask & ~kept),
        "ages": _count(at, mask),
        "future": (mask & (age < 0)).sum(),
        "logprob_diff": difference.sum(),
        "same_version": same.sum(),
        "logprob_diff_same_version": torch.where(same, difference, 0.0).sum(),
        "max_logprob_diff_same_version": torch.cat([torch.where(same, difference, -1.0), difference.new_full((1,), -1.0)]).max(),
    }
    return {name: value.detach().double() for name, value in sums.items()}


def _count(place: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(AGES, dtype=torch.float64, device=mask.device).index_add_(0, place, mask.double())


def metrics(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the figures of a step from `SUMS` over all micro-batches and ranks. Means are over sampled tokens, log-probabilities in nats.

    Returns:
        A figure for each of these fields of `telemetry.schema.Step`, which record it:
        sampled_tokens: sampled tokens.
        rejected_fraction: share of tokens not trained on; rejected_by_rule: share each rule rejects on its own, for rules that reject any;
            rejected_by_age: rejected share of the tokens of each age, for ages with rejected tokens.
        clip_fraction: share of the kept tokens on which the clip acts.
        tis_capped_fraction: share of tokens whose weight is capped; correction_mean: mean weight of kept tokens.
        ratio_mean: mean of w = pi / pi_engine, with log w clamped to [-20, 20].
        ess: effective sample size as a share, (sum w)^2 / (n sum w^2): 1 on policy, 1 / n if a single token has all the weight.
        train_infer_kl: KL(engine || trainer), the k3 estimate, never negative; train_infer_kl_direct: mean of log pi_engine - log pi,
            unbiased but noisy.
        kl_reference: KL(trainer || reference), k3 estimate, valid only for tokens sampled by the trainer's policy; None without reference.
        logprob_tokens_same_version: number of tokens whose prefix was computed under the trainer's version.
        logprob_diff_mean: mean |trainer - engine|; logprob_diff_mean_same_version, logprob_diff_max_same_version: mean and maximum over
            tokens of trajectories sampled entirely by the weights being trained; None without such tokens.
        ages: sampled tokens by age, i.e. the trainer's version minus the token's; ages above 63 count as 64.
    """
    values = {name: np.asarray(value, np.float64) for name, value in sums.items()}
    one = {name: float(value) for name, value in values.items() if value.ndim == 0}
    tokens, kept, same = max(one["tokens"], 1.0), max(one["kept"], 1.0), one["same_version"]
    ages, rejected_ages = values["ages"], values["rejected_ages"]
    return {
        "sampled_tokens": int(one["tokens"]),
        "rejected_fraction": (one["tokens"] - one["kept"]) / tokens,
        "rejected_by_rule": {name: float(n) / tokens for name, n in zip(RULES, values["rejected"], strict=True) if n},
        "rejected_by_age": {int(age): float(rejected_ages[age] / ages[age]) for age in np.flatnonzero(rejected_ages)},
        "clip_fraction": one["clipped"] / kept,
        "tis_capped_fraction": one["tis_capped"] / tokens,
        "correction_mean": one["correction"] / kept,
        "ratio_mean": one["ratio"] / tokens,
        "ess": one["ratio"] ** 2 / (tokens * one["ratio_squared"]) if one["ratio_squared"] > 0 else 0.0,
        "train_infer_kl": one["kl"] / tokens,
        "train_infer_kl_direct": one["kl_direct"] / tokens,
        "kl_reference": one["kl_reference"] / one["referenced"] if one["referenced"] else None,
        "logprob_diff_mean": one["logprob_diff"] / tokens,
        "logprob_diff_mean_same_version": one["logprob_diff_same_version"] / same if same else None,
        "logprob_diff_max_same_version": one["max_logprob_diff_same_version"] if same else None,
        "logprob_tokens_same_version": int(same),
        "ages": {int(age): int(ages[age]) for age in np.flatnonzero(ages)},
    }
