"""Choose the groups to keep, by a pure function of the configuration and the group's number: all processes agree without messages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from random import Random

import numpy as np

from asyncmoe.config import Config


@dataclass(frozen=True)
class Choice:
    """Keeps `groups` out of every `of` consecutive group numbers.

    A group keeps its number over attempts, leases and resumed runs, so it is either always kept or never.

    Attributes:
        seed: run.seed.
        groups: telemetry.samples.groups.
        of: rollout.groups_per_step.
    """

    seed: int
    groups: int
    of: int

    def takes(self, group: int) -> bool:
        """Whether the group with this number is kept."""
        return self.groups > 0 and group % self.of in _places(self.seed, group // self.of, min(self.groups, self.of), self.of)


def choice_of(config: Config) -> Choice:
    """Return the choice of a configuration."""
    return Choice(config.run.seed, config.telemetry.samples.groups, config.rollout.groups_per_step)


@lru_cache(maxsize=256)
def _places(seed: int, block: int, count: int, of: int) -> frozenset[int]:
    return frozenset(Random(f"{seed} samples {block}").sample(range(of), count))


def kept(size: int, most: int) -> tuple[int, int]:
    """Return how many tokens are kept at the beginning and at the end of `size` tokens, at most `most` in all."""
    if size <= most:
        return size, 0
    return most - most // 2, most // 2


def ends(values: np.ndarray, head: int, tail: int) -> np.ndarray:
    """Return the first `head` and last `tail` values."""
    return values if head + tail == len(values) else np.concatenate([values[:head], values[len(values) - tail :]])
