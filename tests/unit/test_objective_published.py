"""Losses, gradients, advantages and penalties as verl's and TRL's own code gives them, recorded in data/objective_published.json.

How they were made: the wheels of verl 0.9.1 and trl 1.16.0 were unpacked beside torch 2.13 (verl with `ray` replaced by a mock, which none
of this uses), the inputs of the file cast to float64, and called were
    verl.trainer.ppo.core_algos: compute_policy_loss_{vanilla, gspo, cispo, dppo_tv} (clip_ratio_c = 1e9 where no dual clip is named),
        compute_*_outcome_advantage with the reward on a response's last token, kl_penalty
    verl.trainer.ppo.rollout_corr_helper: compute_rollout_correction_weights, whose result is `rollout_is_weights` of the loss, and
        compute_rollout_rejection_mask, whose result is its `response_mask`
    trl.GRPOTrainer._compute_loss, on a plain object with the options as attributes, whose forward pass returns "new"; no accumulation;
        "num_items_in_batch" the sum of the mask, "importance_sampling_ratio" the truncated exp(old - behaviour)
    the lines of trl.GRPOTrainer that compute the advantages of "normalize_then_sum", on "parts" with NaN for null; its epsilon is 1e-4
with `new` as the leaf of the gradient. "objective" is the same choice in our configuration. Not compared, as they differ on purpose: verl
and TRL keep a group of one as it is, where we say 0; verl's token_k1 keeps ratios within [1 / high, 1 / low], so its bands here are
symmetric.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.trainer.objective import Rows, group_advantages, policy_loss, scale, segments, token_weights
from asyncmoe.trainer.objective.surrogate import penalty

PUBLISHED = json.loads((Path(__file__).parent / "data" / "objective_published.json").read_text())
INPUTS = PUBLISHED["inputs"]
MASK = torch.tensor(INPUTS["mask"]).bool()


def flat(name: str) -> torch.Tensor:
    return torch.tensor(INPUTS[name], dtype=torch.float32).flatten()


@pytest.mark.parametrize("case", PUBLISHED["losses"], ids=lambda case: case["source"].rpartition(".")[2])
def test_losses_and_gradients(case: dict[str, Any]) -> None:
    section = ObjectiveSection(**case["objective"])
    sampled = MASK.sum(1).tolist()
    weights = token_weights(sampled, section.aggregation, INPUTS["groups"], case["max_new_tokens"])
    count, length = MASK.shape
    rows = Rows(
        mask=MASK.flatten(),
        weights=torch.from_numpy(weights).float().repeat_interleave(length),
        advantages=torch.tensor(INPUTS["advantages"]).repeat_interleave(length),
        behaviour=flat(case.get("behaviour", "behaviour")),
        versions=torch.zeros(count * length, dtype=torch.int32),
        pure=MASK.flatten(),
        segments=segments([length] * count, count * length),
        sequences=count,
        proximal=flat("old"),
        reference=flat("reference"),
    )
    new = flat("new").requires_grad_()
    loss, sums = policy_loss(new, rows, section, 0)
    loss.backward()
    by = scale(sums)
    if case["loss"] is not None:
        assert loss.item() * by == pytest.approx(case["loss"], rel=2e-5, abs=1e-6)
    torch.testing.assert_close(new.grad.view_as(MASK).double() * by, torch.tensor(case["gradient"]).double(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("case", PUBLISHED["advantages"], ids=lambda case: case["estimator"])
def test_advantages(case: dict[str, Any]) -> None:
    got = group_advantages(INPUTS["rewards"], INPUTS["groups"], case["estimator"], MASK.sum(1).tolist())
    np.testing.assert_allclose(got, case["values"], rtol=1e-5, atol=1e-6)


def test_gdpo() -> None:
    case = PUBLISHED["gdpo"]
    parts = [(weight, np.array(part, np.float64)) for weight, part in zip(case["weights"], case["parts"], strict=True)]
    got = group_advantages([0.0] * len(case["groups"]), case["groups"], "gdpo", (), parts)
    np.testing.assert_allclose(got, case["values"], atol=1e-3)


@pytest.mark.parametrize("case", PUBLISHED["penalties"], ids=lambda case: case["estimator"])
def test_penalties(case: dict[str, Any]) -> None:
    got = penalty(flat("new"), flat("reference"), torch.zeros(MASK.numel()), case["estimator"]) * MASK.flatten()
    torch.testing.assert_close(got.view_as(MASK), torch.tensor(case["values"]), rtol=1e-4, atol=1e-6)
