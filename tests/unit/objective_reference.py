"""The objectives straight from their formulae, in float64, one token at a time, as a reference for tests.

A case is a batch of sequences of tokens. Nothing here comes from `asyncmoe.trainer`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor


@dataclass
class Token:
    """A sampled token: log-probabilities, and the version that sampled it."""

    new: float
    behaviour: float
    old: float
    reference: float
    version: int


@dataclass
class Sequence:
    tokens: list[Token]
    advantage: float
    group: int


@dataclass
class Setting:
    """Everything an objective depends on besides the tokens; `section` as in the configuration."""

    section: Any
    version: int
    progress: float
    max_new_tokens: int


@dataclass
class Result:
    loss: float
    gradients: list[list[float]]
    magnitude: float
    """Sum of the terms' absolute values: what rounding errors are measured against."""
    kept: list[list[bool]]


def evaluate(sequences: list[Sequence], setting: Setting) -> Result:
    """The objective of the whole batch, with its denominator, and its gradient by every log-probability of the trainer."""
    leaves = [[torch.tensor(t.new, dtype=torch.float64, requires_grad=True) for t in s.tokens] for s in sequences]
    new = [[_log(x) for x in row] for row in leaves]
    terms, penalties, kept = [], [], []
    for s, row in zip(sequences, new, strict=True):
        values, keep = _sequence(s, row, setting)
        terms.append(values)
        kept.append(keep)
        penalties.append([_penalty(t, x, setting) for t, x in zip(s.tokens, row, strict=True)])
    total, magnitude = _aggregate(sequences, terms, penalties, kept, setting)
    if total.requires_grad:
        total.backward()
    gradients = [[0.0 if x.grad is None else float(x.grad) for x in row] for row in leaves]
    return Result(_value(total), gradients, magnitude, kept)


def _log(x: Tensor) -> Tensor:
    return x.clamp(-1e4, 1e4)


def _value(x: Tensor) -> float:
    return float(x.detach())


def _number(x: float) -> Tensor:
    return _log(torch.tensor(x, dtype=torch.float64))


def _exp(x: Tensor) -> Tensor:
    return x.clamp(-20.0, 20.0).exp()


def _proximal(t: Token, x: Tensor, at: Setting) -> Tensor:
    kind = at.section.proximal
    if kind == "behaviour":
        return _number(t.behaviour)
    if kind == "recompute":
        return _number(t.old)
    now, before = at.version + at.progress, at.version
    if now == t.version:
        return x.detach()
    alpha = (before - t.version) / (now - t.version)
    return _number(t.behaviour) + alpha * (x.detach() - _number(t.behaviour))


def _sequence(s: Sequence, row: list[Tensor], at: Setting) -> tuple[list[Tensor], list[bool]]:
    section, rule = at.section, at.section.correction
    count = len(s.tokens)
    old = [_proximal(t, x, at) for t, x in zip(s.tokens, row, strict=True)]
    engine = [_number(t.behaviour) for t in s.tokens]
    log_rho = [float((x.detach() if section.proximal == "behaviour" else o) - b) for x, o, b in zip(row, old, engine, strict=True)]

    mean_ratio = sum((x.detach() - o for x, o in zip(row, old, strict=True)), torch.zeros((), dtype=torch.float64)) / max(count, 1)
    product, drift = sum(log_rho), sum(float(b - x.detach()) for x, b in zip(row, engine, strict=True)) / max(count, 1)

    values, keep = [], []
    for i, t in enumerate(s.tokens):
        ratio = _exp(row[i] - old[i]) if section.ratio == "token" else _exp(mean_ratio + row[i] - row[i].detach())
        value = _clip(ratio, row[i], old[i], s.advantage, section)
        log_weight = {"token": log_rho[i], "sequence": product, "none": 0.0}[rule.weight]
        weight = math.exp(min(max(log_weight, -20.0), 20.0))
        if rule.weight != "none" and rule.cap is not None:
            weight = min(weight, rule.cap)
        values.append(weight * value)
        rejected = (
            _outside(log_rho[i], rule.token_band)
            or _outside(product, rule.sequence_band)
            or _outside(product / count, rule.geometric_band)
            or any(_outside(r, rule.veto) for r in log_rho)
            or (rule.opsm_delta is not None and s.advantage < 0 and drift > rule.opsm_delta)
            or (rule.max_age is not None and at.version - t.version > rule.max_age)
        )
        keep.append(not rejected)
    return values, keep


def _outside(log_ratio: float, band: tuple[float, float] | None) -> bool:
    if band is None:
        return False
    return log_ratio > math.log(band[1]) or (band[0] > 0 and log_ratio < math.log(band[0]))


def _clip(r: Tensor, x: Tensor, o: Tensor, advantage: float, section: Any) -> Tensor:
    low, high = 1 - section.clip_low, 1 + section.clip_high
    if section.clip == "none":
        return -advantage * r
    if section.clip == "cispo":
        return -min(max(_value(r), low), high) * advantage * x
    if section.clip in ("dppo_tv", "ipo"):
        moved = math.exp(_value(x)) - math.exp(_value(o))
        far_up, far_down = moved > section.clip_high, moved < -section.clip_low
        cut = (far_up or far_down) if section.clip == "ipo" else (far_up if advantage > 0 else far_down)
        return 0.0 * r if cut else -advantage * r
    # PPO's objective is the smaller of two; the loss is its negative.
    objective = min(r * advantage, r.clamp(low, high) * advantage, key=_value)
    if section.dual_clip is not None and advantage < 0:
        objective = max(objective, torch.tensor(section.dual_clip * advantage, dtype=torch.float64), key=_value)
    return -objective


def _penalty(t: Token, x: Tensor, at: Setting) -> Tensor:
    d = (_number(t.reference) - x).clamp(-20.0, 20.0)
    kind = at.section.kl.estimator
    if kind == "k1":
        return -d
    if kind == "k2":
        return 0.5 * d * d
    k3 = d.exp() - d - 1
    return _exp(x - _number(t.behaviour)) * k3 if kind == "unbiased" else k3


def _aggregate(
    sequences: list[Sequence], terms: list[list[Tensor]], penalties: list[list[Tensor]], kept: list[list[bool]], at: Setting
) -> tuple[Tensor, float]:
    """The mean that the aggregation names: over kept tokens, or over all with nothing from rejected ones but the penalty."""
    section = at.section
    planned = section.correction.denominator == "planned" or section.aggregation == "sequence_sum"
    zero = torch.zeros((), dtype=torch.float64)
    if not any(k for row in kept for k in row):
        return zero, 0.0

    def token(i: int, j: int) -> Tensor:
        own = terms[i][j] if kept[i][j] else zero
        return own + section.kl.coefficient * penalties[i][j] if section.kl.coefficient else own

    counted = [[j for j in range(len(s.tokens)) if planned or kept[i][j]] for i, s in enumerate(sequences)]
    pairs = [(i, j) for i, row in enumerate(counted) for j in row]
    sampled = [len(s.tokens) for s in sequences]
    some = [i for i, n in enumerate(sampled) if n]
    if section.aggregation == "token_mean":
        share = {p: 1 / len(pairs) for p in pairs}
    elif section.aggregation == "sequence_mean":
        alive = [i for i, row in enumerate(counted) if row]
        share = {(i, j): 1 / (len(alive) * len(counted[i])) for i, j in pairs}
    elif section.aggregation == "sequence_sum":
        share = {p: 1 / (len(some) * at.max_new_tokens) for p in pairs}
    else:
        length: dict[int, int] = {}
        for s in sequences:
            length[s.group] = length.get(s.group, 0) + len(s.tokens)
        raw = {(i, j): 1 / length[sequences[i].group] for i, j in pairs}
        whole = sum(raw.values())
        share = {p: w / whole for p, w in raw.items()}
    total = sum((share[i, j] * token(i, j) for i, j in pairs), zero)
    return total, sum(abs(_value(share[i, j] * token(i, j))) for i, j in pairs)
