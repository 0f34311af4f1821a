"""Surrogate losses of single tokens from their ratio and advantage."""

from __future__ import annotations

import torch

from asyncmoe.config.objective import ObjectiveSection


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
