"""The loss of single tokens: the proximal policy, the importance ratio to it, the clip, and the penalty towards a reference policy."""

from __future__ import annotations

import torch

from asyncmoe.config.objective import Estimator, ObjectiveSection
from asyncmoe.errors import InvariantBroken
from asyncmoe.trainer.objective.rows import LOG_RATIO_LIMIT, Rows, exp


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
        raise InvariantBroken("with several updates per batch, micro-batches need the log-probabilities from before the first update")
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


def ratio(new: torch.Tensor, old: torch.Tensor, rows: Rows, level: str) -> torch.Tensor:
    """Compute the ratio of each row: float32[T] with gradient; clamped to [e^-20, e^20], beyond which the gradient is zero.

        token     r = pi / pi_old                                                        PPO, arXiv 1707.06347, eq. 6
        sequence  s = sg(geometric mean of the sequence's r) * pi / sg(pi)               GSPO-token, arXiv 2507.18071, eq. 14

    sg stops the gradient. The geometric mean is over all sampled tokens of the sequence, including tokens rejected later.

    Args:
        new: float32[T] with gradient, from `clamped`.
        old: float32[T], from `clamped`.
    """
    log_ratio = new - old
    if level == "sequence":
        # In float64: differences of single tokens may cancel and be thousands of times their mean.
        mean = rows.mean(new.detach().double() - old.double())
        log_ratio = rows.spread(mean).to(new.dtype) + (new - new.detach())
    return exp(log_ratio)


def surrogate(
    ratio: torch.Tensor, new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, section: ObjectiveSection
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token, and whether the clip cuts it: float32[T] with gradient, bool[T].

    With r the ratio, A the advantage, low and high the bounds, c = dual_clip, and sg stopping the gradient:
        ppo      max(-A r, -A clip(r, 1 - low, 1 + high))        PPO, arXiv 1707.06347, eq. 7; unequal bounds: DAPO, arXiv 2503.14476
                 with dual_clip, where A < 0: at most -c A       arXiv 1912.09729 (dual-clip PPO)
        cispo    -sg(clip(r, 1 - low, 1 + high)) A log pi        MiniMax-M1, arXiv 2506.13585
        none     -A r                                            its gradient is REINFORCE's with the weight r
        dppo_tv  -A r where pi - pi_old <= high (A > 0), or >= -low (A <= 0); else 0     DPPO, arXiv 2602.04879
        ipo      -A r where -low <= pi - pi_old <= high; else 0                          prime-rl's "IPO"
    A token is cut if the clip removes its gradient, or in cispo, truncates its weight.

    Args:
        ratio: float32[T] with gradient.
        new, old: float32[T], from `clamped`; log-probabilities of the trainer, with gradient, and of the proximal policy.
    """
    low, high = section.clip_low, section.clip_high
    bounded = ratio.clamp(1.0 - low, 1.0 + high)
    if section.clip == "cispo":
        return -bounded.detach() * advantages * new, (bounded != ratio).detach()
    plain = -advantages * ratio
    if section.clip == "none":
        return plain, torch.zeros_like(ratio, dtype=torch.bool)
    if section.clip == "ppo":
        return _ppo(plain, -advantages * bounded, advantages, section.dual_clip)
    with torch.no_grad():
        moved = new.exp() - old.exp()
        up, down = moved > high, moved < -low
        cut = torch.where(advantages > 0, up, down) if section.clip == "dppo_tv" else up | down
    return torch.where(cut, 0.0, plain), cut


def _ppo(
    plain: torch.Tensor, clipped: torch.Tensor, advantages: torch.Tensor, dual_clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    value, cut = torch.maximum(plain, clipped), (clipped > plain).detach()
    if dual_clip is None:
        return value, cut
    limit = -dual_clip * advantages
    beyond = ((advantages < 0) & (value > limit)).detach()
    return torch.where(beyond, limit, value), cut | beyond


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return e^d - 1 - d >= 0 with d = log q(x) - log p(x) clamped to [-20, 20]; its mean over x ~ p is KL(p || q) (Schulman,
    "Approximating KL divergence", 2020)."""
    held = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return held.exp() - 1.0 - held


def penalty(new: torch.Tensor, reference: torch.Tensor, log_weight: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Estimate KL(pi || pi_ref) for each token: float32[T] with gradient.

        with d = log pi_ref - log pi, clamped to [-20, 20]
        k1        -d             its gradient, that of log pi, has expectation zero: the value is right, but the penalty has no effect
        k2        d^2 / 2        its gradient is the divergence's if the trainer's policy sampled the tokens
        k3        e^d - 1 - d
        unbiased  w (e^d - 1 - d), w = pi / pi_b with gradient: its gradient is the divergence's, whichever policy sampled the token
    (Schulman 2020; DeepSeek-V3.2, arXiv 2512.02556, section 3.1, whose pi_old is the engine's policy.)

    Args:
        new: float32[T] with gradient, from `clamped`; over the same ids as `reference`.
        reference: float32[T], from `clamped`.
        log_weight: float32[T] with gradient: log w, relative to the behaviour policy, over the recorded support.
    """
    # In float64: for small d, k3 is a small difference of large numbers.
    d = (reference.double() - new.double()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        value = -d
    elif estimator == "k2":
        value = d**2 / 2
    else:
        value = k3(d)
    value = value.to(new.dtype)
    return value * exp(log_weight) if estimator == "unbiased" else value
