"""Which version sampled: parts of a batch that an engine sampled with the version before are found, and no others."""

from __future__ import annotations

import numpy as np
import pytest

from asyncmoe.flight.agreement import StaleTokens, stale
from asyncmoe.trajectory import Trajectory
from tests.unit.example_counts import examples
from tests.unit.kept_trajectory import sampled

FLOAT32, BFLOAT16 = 1e-6, 2e-2
"""Sizes of rounding, in nats."""


def _batch(
    seed: int, noise: float, change: float, planted: float = 0.0, longest: int = 80
) -> tuple[dict[int, Trajectory], dict[int, dict[int, np.ndarray]], set[tuple[int, int]]]:
    """A batch of 24 trajectories, half of which span two versions; tokens of the second have keys and values of the first, too.

    Args:
        change: how much an update changes log-probabilities, in nats.
        planted: share of stale parts.

    Returns:
        the trajectories, the trainer's log-probabilities, and (position, version) of the stale parts.
    """
    random, trajectories, wrong = np.random.default_rng(seed), {}, set[tuple[int, int]]()
    trainer: dict[int, dict[int, np.ndarray]] = {version: {} for version in range(4)}
    for position in range(24):
        length, first, spans = random.integers(4, longest + 4), int(random.integers(1, 3)), position % 2
        sizes = change * random.exponential(size=length)  # confident tokens barely change
        exact = np.cumsum(random.normal(size=(4, length)) * sizes, axis=0) - 2  # by version
        mask, versions = np.arange(length) >= 3, first + spans * (np.arange(length) >= (length + 3) // 2)
        chosen = [version for version in np.unique(versions[mask]).tolist() if random.random() < planted]
        wrong |= {(position, version) for version in chosen}
        served = versions - np.isin(versions, chosen)
        logprobs = exact[served, np.arange(length)] + noise * random.normal(size=length)
        logprobs += np.where(served == served[3], 0, 0.3 * sizes * random.normal(size=length))  # older keys and values
        trajectories[position] = sampled(np.ones(length), mask, logprobs, versions, prefix_version=first)
        for values, of in zip(trainer.values(), exact, strict=True):
            values[position] = np.where(mask, of + noise * random.normal(size=length), 0).astype(np.float32)
    return trajectories, trainer, wrong


@pytest.mark.parametrize(("noise", "change"), [(FLOAT32, 0.05), (FLOAT32, 1e-5), (BFLOAT16, 0.5), (BFLOAT16, 0.02), (BFLOAT16, 0.0)])
@pytest.mark.parametrize("longest", [2, 80])
def test_honest_engines_raise_no_alarm(noise: float, change: float, longest: int) -> None:
    for seed in range(examples(100)):
        assert stale(1, *_batch(seed, noise, change, longest=longest)[:2]) == []


@pytest.mark.parametrize(("noise", "change"), [(FLOAT32, 0.05), (BFLOAT16, 2.0)])
@pytest.mark.parametrize("planted", [0.1, 0.5, 1.0])
def test_parts_of_the_version_before_are_found(noise: float, change: float, planted: float) -> None:
    caught, missed, later = 0, 0, 0
    for seed in range(20):
        trajectories, trainer, wrong = _batch(seed, noise, change, planted)
        found = {(one.position, one.claimed) for one in stale(1, trajectories, trainer)}
        exact = {(i, version) for i, version in wrong if version == trajectories[i].prefix_version}
        assert found <= wrong
        caught, missed, later = caught + len(found & exact), missed + len(exact - found), later + len(found - exact)
    assert caught > 20 * missed
    assert (later > 0) == (planted < 1)  # the first version's part must be honest


def test_a_finding_names_tokens_and_differences() -> None:
    mask = np.array([False, True, False, True, True])
    one = sampled(np.ones(5), mask, -1.0, 5, prefix_version=5)
    found = StaleTokens(6, 7, 5, difference=0.5, before=0.0, tokens=(1, 5))
    for own, before, expected in ((-1.5, -1.0, [found]), (-1.5, -1.125, []), (-1.0005, -1.0, [])):  # 4 times as close; too small
        trainer = {5: {7: np.where(mask, own, 9)}, 4: {7: np.where(mask, before, 9)}}
        assert stale(6, {7: one}, trainer) == expected
    assert stale(6, {7: one}, {5: trainer[5]}) == []  # nothing to compare with
