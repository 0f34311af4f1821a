"""Probe tokens: log-probabilities of the trainer that the controller compares with an engine's at the same version (`verify.probe_every`).

In an asynchronous run almost no batch is of the trainer's own version, so batches alone do not show whether engines compute what the
trainer computes. The trainer scores the first tokens of some trajectories of its batch before its weights change; the controller asks an
engine once it serves that version (`asyncmoe.engines.probes`). Routers choose live on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncmoe.config import Config
from asyncmoe.rpc.item import Item
from asyncmoe.trajectory import NOT_SAMPLED, Trajectory

MOST = 128
"""Tokens of one trajectory; the engine computes logits for each of them at once."""


@dataclass(frozen=True)
class Chosen:
    """Position of a trajectory in the batch, and how many of its first tokens are scored."""

    position: int
    tokens: int


def due(config: Config, step: int) -> bool:
    """Whether the trainer's version `step` is probed: one of `verify.probe_every` published versions is."""
    rl, every, sync = step - config.warmup.steps, config.verify.probe_every, config.sync.every
    return every > 0 and rl >= 0 and rl % sync == 0 and (rl // sync) % every == 0


def choose(items: Sequence[Item], tokens: int) -> tuple[Chosen, ...]:
    """Choose trajectories with at least `tokens` first tokens together if there are as many: of every group one first, then more."""
    firsts: dict[int, int] = {}
    for position, item in enumerate(items):
        firsts.setdefault(item.group, position)
    order = [*firsts.values(), *(position for position in range(len(items)) if position not in firsts.values())]
    chosen: list[Chosen] = []
    left = tokens
    for position in order:
        if left <= 0:
            break
        count = min(items[position].tokens, MOST, max(left, 2))
        if count >= 2:  # the first token has no log-probability
            chosen.append(Chosen(position, count))
            left -= count
    return tuple(chosen)


def bare(texts: Sequence[Sequence[int] | np.ndarray]) -> dict[int, Trajectory]:
    """Return texts, by their number, as trajectories without anything recorded."""
    return {place: _bare(place, np.asarray(text, np.int32)) for place, text in enumerate(texts)}


def _bare(place: int, tokens: np.ndarray) -> Trajectory:
    nothing, none = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), bool)
    versions = np.full(len(tokens), NOT_SAMPLED, np.int32)
    return Trajectory(f"probe{place}", place, 0, tokens, none, nothing, versions, 0.0, "length")
