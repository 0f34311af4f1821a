"""Token statistics of a step, computed by hand; over whole trajectories in test_row_sums.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.trainer.objective import AGES, SUMS, Sums, metrics, policy_loss
from tests.unit.test_objective import rows

ON_POLICY = {"weight": "none"}


def sums_of(new: list[float], version: int = 0, correction: Any = ON_POLICY, **fields: Any) -> Sums:
    plain = rows(behaviour=[0.0] * len(new))
    at = replace(plain, **{"proximal": None} | {name: torch.tensor(value) for name, value in fields.items()})
    return policy_loss(torch.tensor(new), at, ObjectiveSection(correction=correction), version)[1]


def test_engine_and_trainer_are_compared_at_the_same_version_only() -> None:
    given_ = {
        "behaviour": [-1.1, -1.3, -2.0, -3.0, -9.0],
        "mask": [True, True, True, True, False],
        "versions": [4, 4, 3, 4, 4],
        "pure": [True, True, True, False, True],
    }
    said = metrics(sums_of([-1.0] * 5, version=4, **given_))
    assert said["logprob_diff_max_same_version"] == pytest.approx(0.3)
    assert said["logprob_diff_mean_same_version"] == pytest.approx(0.2)
    assert said["logprob_diff_mean"] == pytest.approx((0.1 + 0.3 + 1 + 2) / 4)
    later = metrics(sums_of([-1.0] * 5, version=5, **given_))
    assert (later["logprob_diff_max_same_version"], later["logprob_diff_mean_same_version"]) == (None, None)


def test_ages_are_counted_and_the_future_is_seen() -> None:
    sums = sums_of([0.0] * 5, version=100, versions=[100, 99, 200, 3, 101], mask=[True, True, False, True, True])
    assert metrics(sums)["ages"] == {0: 2, 1: 1, AGES - 1: 1}
    assert int(sums["future"]) == 1


def test_shares_are_of_what_they_are_about() -> None:
    """Clipped, of the tokens that are trained on; capped, of all."""
    correction = {"weight": "token", "cap": 2.0, "token_band": [0.5, 5.0]}
    said = metrics(
        sums_of([1.0, 1.0, 0.0, 0.0], correction=correction, proximal=[0.0] * 4, behaviour=[-2.0, -1.0, 0.0, 0.0])
    )  # ratios 7.4 (rejected), 2.7 (capped), 1, 1; the first two clipped
    assert said["rejected_fraction"] == 0.25
    assert said["clip_fraction"] == pytest.approx(1 / 3)
    assert said["tis_capped_fraction"] == 0.5
    assert said["correction_mean"] == pytest.approx((2.0 + 1 + 1) / 3)


def test_figures_without_tokens_and_without_a_reference() -> None:
    said = metrics({name: torch.zeros(shape, dtype=torch.float64) for name, shape in SUMS.items()})
    figures = [said[name] for name in ("sampled_tokens", "train_infer_kl", "ess", "kl_reference", "ages")]
    assert figures == [0, 0.0, 0.0, None, {}]
    assert metrics(sums_of([-1.0]))["kl_reference"] is None
