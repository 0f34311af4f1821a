"""Advantages, weights, losses and log-probabilities against closed forms and autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.trainer.objective import Rows, agreement, group_advantages, policy_loss, supervised_loss, token_weights

finite = st.floats(-5, 5, allow_nan=False, width=32)


def test_grpo_divides_by_the_sample_deviation() -> None:
    assert group_advantages([1, 0, 0, 1, 5, 5], [2, 2, 2, 2, 8, 8], "grpo") == pytest.approx(
        [0.5 / np.std([1, 0, 0, 1], ddof=1) * s for s in (1, -1, -1, 1)] + [0, 0], abs=1e-5
    )


@given(st.lists(st.tuples(finite, st.integers(0, 4)), min_size=1, max_size=40))
def test_advantages_of_a_group_sum_to_nothing_and_groups_do_not_mix(pairs: list[tuple[float, int]]) -> None:
    rewards, groups = zip(*pairs, strict=True)
    plain = group_advantages(rewards, groups, "grpo_no_std")
    for group in set(groups):
        here = [i for i, g in enumerate(groups) if g == group]
        assert sum(plain[i] for i in here) == pytest.approx(0, abs=1e-4)
        alone = group_advantages([rewards[i] for i in here], [0] * len(here), "grpo")
        assert group_advantages(rewards, groups, "grpo")[here] == pytest.approx(alone, abs=1e-5)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50))
def test_token_weights_sum_to_one(sampled: list[int]) -> None:
    for aggregation in ("token_mean", "sequence_mean"):
        assert float(token_weights(sampled, aggregation) @ np.array(sampled)) == pytest.approx(1)  # type: ignore[arg-type]
    assert len(set(token_weights(sampled, "token_mean").tolist())) == 1
    per_sequence = token_weights(sampled, "sequence_mean") * np.array(sampled)
    assert per_sequence == pytest.approx(np.full(len(sampled), 1 / len(sampled)))


def rows(**given_: list[float]) -> Rows:
    count = len(next(iter(given_.values())))
    plain = {"weights": [1.0] * count, "advantages": [1.0] * count, "behaviour": [0.0] * count, "proximal": [0.0] * count} | given_
    tensors = {name: torch.tensor(values, dtype=torch.float32) for name, values in plain.items()}
    mask = torch.tensor([w > 0 for w in plain["weights"]])
    return Rows(mask=mask, **tensors)


def loss_and_gradient(logprobs: list[float], at: Rows, **options: float | None) -> tuple[float, list[float], dict[str, float]]:
    current = torch.tensor(logprobs, requires_grad=True)
    loss, sums = policy_loss(current, at, **({"clip_low": 0.2, "clip_high": 0.2, "tis_cap": None} | options))  # type: ignore[arg-type]
    loss.backward()
    assert current.grad is not None
    return loss.item(), current.grad.tolist(), {k: float(v) for k, v in sums.items()}


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    _, gradient, _ = loss_and_gradient(
        [-1.0, -2.0], rows(proximal=[-1.0, -2.0], behaviour=[-1.0, -2.0], advantages=[0.5, -1.5], weights=[0.25, 0.75])
    )
    assert gradient == pytest.approx([-0.5 * 0.25, 1.5 * 0.75])


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "cut"),
    [
        (1.1, 1.0, -1.1, False),
        (1.5, 1.0, -1.3, True),  # clipped at 1 + high
        (0.5, 1.0, -0.5, False),
        (0.5, -1.0, 0.9, True),  # clipped at 1 - low
        (1.5, -1.0, 1.5, False),
    ],
)
def test_the_clip_cuts_on_one_side(ratio: float, advantage: float, expected: float, cut: bool) -> None:
    loss, (gradient,), sums = loss_and_gradient([float(np.log(ratio))], rows(advantages=[advantage]), clip_low=0.1, clip_high=0.3)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert gradient == pytest.approx(0.0 if cut else -advantage * ratio, rel=1e-5)
    assert sums["clipped"] == cut


def test_importance_weight_is_capped_and_carries_no_gradient() -> None:
    at = rows(proximal=[0.0, 0.0], behaviour=[-3.0, 0.5], advantages=[1.0, 1.0])
    loss, gradient, sums = loss_and_gradient([0.0, 0.0], at, tis_cap=2.0)
    weight = [2.0, float(np.exp(-0.5))]
    assert loss == pytest.approx(-sum(weight))
    assert gradient == pytest.approx([-w for w in weight])
    assert sums["tis_capped"] == 1


def test_rows_outside_the_mask_do_not_count() -> None:
    inside = rows(advantages=[1.0], proximal=[-0.1], behaviour=[-0.2])
    mixed = rows(advantages=[1.0, 9.0], proximal=[-0.1, 5.0], behaviour=[-0.2, float("inf")], weights=[1.0, 0.0])
    alone, (slope,), sums = loss_and_gradient([-0.3], inside, tis_cap=2.0)
    both, slopes, mixed_sums = loss_and_gradient([-0.3, -77.0], mixed, tis_cap=2.0)
    assert (alone, sums) == (both, mixed_sums)
    assert slopes == [slope, 0.0]


@given(st.lists(st.tuples(st.floats(-1e4, 0), st.floats(-1e4, 0), st.floats(-1e4, 0), st.floats(-10, 10)), min_size=1, max_size=20))
def test_extreme_ratios_stay_finite(values: list[tuple[float, float, float, float]]) -> None:
    logprobs, proximal, behaviour, advantages = (list(column) for column in zip(*values, strict=True))
    loss, gradient, sums = loss_and_gradient(logprobs, rows(proximal=proximal, behaviour=behaviour, advantages=advantages), tis_cap=2.0)
    assert np.isfinite([loss, *gradient, *sums.values()]).all()


def test_sums_are_the_metrics_they_claim_to_be() -> None:
    _, _, sums = loss_and_gradient([-1.0, -1.0], rows(behaviour=[-1.5, -0.9], proximal=[-1.0, -1.0]))
    ratios = np.exp([0.5, -0.1])
    assert sums["tokens"] == 2
    assert sums["ratio"] == pytest.approx(ratios.sum())
    assert sums["kl"] == pytest.approx((ratios - 1 - np.log(ratios)).sum(), rel=1e-5)


def test_agreement_looks_at_pure_rows_of_this_version_only() -> None:
    logprobs, behaviour = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-1.1, -2.0, -3.0, -9.0])
    mask = torch.tensor([True, True, True, False])
    versions, pure = torch.tensor([4, 3, 4, 4]), torch.tensor([True, True, False, True])
    sums = agreement(logprobs, behaviour, mask, versions, pure, version=4)
    assert sums["max_logprob_diff_same_version"].item() == pytest.approx(0.1)
    assert sums["logprob_diff"].item() == pytest.approx(0.1 + 1 + 2)
    assert agreement(logprobs, behaviour, mask, versions, pure, version=5)["max_logprob_diff_same_version"].item() == -1


def test_supervised_loss_is_the_weighted_likelihood() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -50.0], requires_grad=True)
    loss, sums = supervised_loss(logprobs, torch.tensor([True, True, False]), torch.tensor([0.5, 0.25, 1.0]))
    loss.backward()
    assert loss.item() == pytest.approx(1.0)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, -0.25, 0.0]
    assert int(sums["tokens"]) == 2
