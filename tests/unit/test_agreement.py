"""The check of engine against trainer finds the tokens that differ, and only looks where they may not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kept_trajectory import trajectory

from asyncmoe.trainer.logprob_mismatch import compare, describe, merge
from asyncmoe.trajectory import NOT_SAMPLED, Trajectory


def of(seed: int, version: int, prefix: int) -> Trajectory:
    made = trajectory(12, seed)[0]
    return replace(made, versions=np.where(made.loss_mask, version, NOT_SAMPLED).astype(np.int32), prefix_version=prefix)


def test_the_worst_tokens_are_named_with_neighbours_and_routes() -> None:
    made, routes, _ = trajectory(12, 1)
    made = replace(made, versions=np.where(made.loss_mask, 4, NOT_SAMPLED).astype(np.int32), prefix_version=4)
    ours = made.logprobs.copy()
    ours[7] -= 0.5
    ours[3] += 0.25
    found = compare([made], [ours], 4, 1)
    assert (found.tokens, found.largest) == (10, pytest.approx(0.5))
    assert found.mean == pytest.approx(0.075)
    assert found.kl == pytest.approx((np.exp(-0.5) - 0.5 + np.exp(0.25) - 1.25) / 10)
    (worst,) = found.worst
    assert (worst.key, worst.place) == ("g1", 7)
    assert [place for place, *_ in worst.around] == [5, 6, 7, 8, 9]
    assert worst.around[2][1:] == (int(made.tokens[7]), pytest.approx(-1.0), pytest.approx(-1.5))
    assert worst.routes == {layer: tuple(routes[6, layer].tolist()) for layer in (1, 2, 3)}
    text = "\n".join(describe(found, 4))
    assert "g1 token 7: 5.00e-01" in text
    assert f"1: {' '.join(map(str, routes[6, 1]))}" in text


def test_only_trajectories_of_one_version_are_compared() -> None:
    batch = [of(1, 4, 4), of(2, 3, 3), of(3, 4, 3), of(4, 4, NOT_SAMPLED)]
    mixed = of(5, 4, 4)
    mixed.versions[-1] = 3
    wrong = [t.logprobs - 1.0 for t in [*batch, mixed]]
    wrong[0] = batch[0].logprobs
    found = compare([*batch, mixed], wrong, 4, 3)
    assert (found.tokens, found.largest) == (10, 0.0)
    nothing = compare(batch[1:], wrong[1:4], 4, 3)
    assert nothing.tokens == 0
    assert "nothing to compare" in describe(nothing, 4)[0]


def test_parts_of_ranks_are_one() -> None:
    a, b = of(1, 4, 4), of(2, 4, 4)
    ours = [t.logprobs + np.linspace(-0.1, 0.2, len(t), dtype=np.float32) for t in (a, b)]
    whole = compare([a, b], ours, 4, 3)
    parts = merge([compare([a], ours[:1], 4, 3), compare([b], ours[1:], 4, 3)], 3)
    assert parts == whole
    assert [token.difference for token in whole.worst] == sorted((token.difference for token in whole.worst), reverse=True)
    assert len(whole.worst) == 3
