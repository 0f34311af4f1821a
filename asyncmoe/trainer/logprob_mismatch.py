"""Log-probability mismatch between engine and trainer on sampled tokens when both have the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncmoe.trajectory import Trajectory, decode_routes

_AROUND = 2
"""Tokens shown on either side of a mismatched token."""


@dataclass(frozen=True)
class Token:
    """A sampled token on which engine and trainer disagree.

    Attributes:
        key: key of its trajectory.
        place: position in the trajectory.
        around: (place, token, engine's log-probability, trainer's log-probability) of this token and its sampled neighbours.
        routes: by layer, the experts that computed its logits, i.e. the preceding token's experts; {} if none were recorded.
    """

    key: str
    place: int
    difference: float
    around: tuple[tuple[int, int, float, float], ...]
    routes: dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class Agreement:
    """Mismatch over `tokens` sampled tokens; log-probabilities are in nats.

    Attributes:
        largest: largest |engine - trainer|; 0 without tokens.
        total: sum of |engine - trainer|.
        divergence: sum of e^d - 1 - d with d = trainer - engine; its mean over tokens drawn from the engine estimates KL(engine ||
            trainer) (Schulman's k3).
        worst: the tokens that differ most, largest difference first.
    """

    tokens: int
    largest: float
    total: float
    divergence: float
    worst: tuple[Token, ...]

    @property
    def mean(self) -> float:
        return self.total / max(self.tokens, 1)

    @property
    def kl(self) -> float:
        return self.divergence / max(self.tokens, 1)


def compare(trajectories: Sequence[Trajectory], ours: Sequence[np.ndarray], version: int, show: int) -> Agreement:
    """Compare the trajectories that `version` alone computed, keys and values included; only for these do equal weights imply equal
    probabilities.

    Args:
        ours: float32[T_i] for each trajectory; the trainer's log-probabilities, aligned with the tokens.
        version: the trainer's weight version.
        show: maximum number of tokens in `worst`.
    """
    parts = [_compare(t, values, show) for t, values in zip(trajectories, ours, strict=True) if t.is_pure and t.oldest_version == version]
    return merge(parts, show)


def merge(parts: Sequence[Agreement], show: int) -> Agreement:
    """Merge results over disjoint sets of tokens."""
    worst = sorted((token for part in parts for token in part.worst), key=lambda token: (-token.difference, token.key, token.place))
    return Agreement(
        sum(part.tokens for part in parts),
        max((part.largest for part in parts), default=0.0),
        sum(part.total for part in parts),
        sum(part.divergence for part in parts),
        tuple(worst[:show]),
    )


def describe(agreement: Agreement, version: int) -> list[str]:
    """Return the lines for the log."""
    a = agreement
    if not a.tokens:
        return [f"engine and trainer at version {version}: nothing to compare; no trajectory of the batch is of this version alone"]
    lines = [
        f"engine and trainer at version {version}: |difference| max {a.largest:.2e}, mean {a.mean:.2e}, KL {a.kl:.2e}, {a.tokens} tokens"
    ]
    for token in a.worst:
        beside = "; ".join(f"[{place}] {id} {engine:.4f} {trainer:.4f}" for place, id, engine, trainer in token.around)
        routes = ", ".join(f"{layer}: {' '.join(map(str, experts))}" for layer, experts in token.routes.items())
        lines.append(f"  {token.key} token {token.place}: {token.difference:.2e}; engine and trainer around it: {beside}")
        lines += [f"    experts by layer: {routes}"] if routes else []
    return lines


def _compare(trajectory: Trajectory, ours: np.ndarray, show: int) -> Agreement:
    t = trajectory
    places = np.flatnonzero(t.loss_mask)
    drift = ours[places].astype(np.float64) - t.logprobs[places]
    difference = np.abs(drift)
    order = np.argsort(-difference, kind="stable")[:show]
    worst = tuple(_token(t, ours, int(places[i]), float(difference[i])) for i in order)
    return Agreement(len(places), float(difference.max()), float(difference.sum()), float((np.expm1(drift) - drift).sum()), worst)


def _token(t: Trajectory, ours: np.ndarray, place: int, difference: float) -> Token:
    beside = [i for i in range(max(place - _AROUND, 0), min(place + _AROUND + 1, len(t))) if t.loss_mask[i]]
    around = tuple((i, int(t.tokens[i]), float(t.logprobs[i]), float(ours[i])) for i in beside)
    routes: dict[int, tuple[int, ...]] = {}
    if t.routes is not None:
        chosen = decode_routes(t.routes, t.key)[:, place - 1]
        routes = {layer: tuple(ids.tolist()) for layer, ids in zip(t.routes.layers, chosen, strict=True)}
    return Token(t.key, place, difference, around, routes)
