"""The proximal policy: the denominator of the clipped ratio."""

from __future__ import annotations

import torch

from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.errors import InvariantBroken
from asyncmoe.trainer.objective.rows import Rows


def proximal_logprobs(new: torch.Tensor, rows: Rows, section: ObjectiveSection, version: int, progress: float) -> torch.Tensor:
    """Return the proximal policy's log-probability of each token: float32[T], without gradient.

        behaviour  the engine's, as recorded
        recompute  the trainer's before the batch's first update: `rows.proximal`; with a single update per batch, `new`
        loglinear  an estimate of the trainer's before the batch's first update: `loglinear`

    (Decoupled PPO, arXiv 2110.00641, and AReaL, arXiv 2505.24298.)

    Args:
        new: float32[T], from `clamped`; the trainer's current log-probabilities.

    Raises:
        InvariantBroken: recompute with several updates per batch, without `rows.proximal`.
    """
    if section.proximal == "behaviour":
        return rows.behaviour
    if section.proximal == "loglinear":
        return loglinear(new.detach(), rows, version, progress)
    if rows.proximal is not None:
        return rows.proximal
    if section.updates_per_batch > 1:
        raise InvariantBroken("several updates to a batch need the log-probabilities from before the first one in the micro-batches")
    return new.detach()


def loglinear(new: torch.Tensor, rows: Rows, version: int, progress: float) -> torch.Tensor:
    """Estimate log-probabilities under the weights before the batch's first update by linear interpolation over versions: float32[T].

        log pi_prox = log pi_b + a (log pi - log pi_b),  a = (v_prox - v_b) / (v - v_b), for each token

    (AReaL's `prox_logp_method: loglinear`.) v_b is the version that sampled the token. v_prox = `version`: the weights at the start of the
    batch, which the batch turns into `version` + 1. v = `version` + `progress`: the weights that give log pi now, part of the way there.
    At the first update v = v_prox, so pi_prox = pi. After it, a token of the newest version has pi_prox = pi_b; for an older token pi_prox
    lies between pi_b and pi, closer to pi the older the token is. (AReaL counts the update in progress as a whole version.)

    Args:
        new: float32[T] without gradient: log pi.
        version: weight version before the batch's first update.
        progress: share of the batch's updates already made; 0 <= progress < 1.
    """
    behind = version - rows.versions.double()
    alpha = torch.where(behind + progress > 0, behind / (behind + progress).clamp(min=1e-9), 1.0).clamp(0.0, 1.0)
    return torch.lerp(rows.behaviour, new, alpha.to(new.dtype))
