"""Score centring: exact where the formula is, the published estimator elsewhere (arXiv 2609.20807, and the coefficients that NeMo RL's and
miles's guides give)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from asyncmoe import models
from asyncmoe.config.objective import CorrectionSection, ObjectiveSection
from asyncmoe.errors import ConfigError
from asyncmoe.trainer.data.batch import pack
from asyncmoe.trainer.data.schedule import BatchGrid
from asyncmoe.trainer.losses import PolicyLoss
from asyncmoe.trainer.objective.centring import centred
from asyncmoe.trajectory import TOP
from tests.configs import minimal
from tests.families import ENGINE, sized
from tests.unit.kept_trajectory import sampled

ROWS, VOCABULARY = 12, 40
WEIGHTS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "none": ({"weight": "none"}, torch.ones_like),
    "truncated": ({"cap": 1.5}, lambda ratio: ratio.clamp(max=1.5)),
    "whole": ({"cap": None}, lambda ratio: ratio),
    "band": ({"cap": None, "token_band": (0.5, 2.0)}, lambda ratio: torch.where((ratio < 0.5) | (ratio > 2.0), 0.0, ratio)),
}


def policies() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the trainer, and log q, whose ids are in the order of q."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(ROWS, VOCABULARY)
    sampler = (logits + torch.randn(ROWS, VOCABULARY)).log_softmax(1)
    order = sampler.argsort(dim=1, descending=True)
    return logits.gather(1, order).double().requires_grad_(), sampler.gather(1, order).double()


def gradient(logits: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(value.sum(), logits, retain_graph=True)
    return found


def estimate(logits: torch.Tensor, sampler: torch.Tensor, name: str) -> torch.Tensor:
    return centred(logits.log_softmax(1)[:, : sampler.shape[1]], sampler, CorrectionSection(**WEIGHTS[name][0]))[0]


@pytest.mark.parametrize("name", WEIGHTS)
def test_over_the_whole_vocabulary_it_is_the_score_that_the_sampler_expects(name: str) -> None:
    logits, sampler = policies()
    new = logits.log_softmax(1)
    exact = (sampler.exp() * WEIGHTS[name][1]((new - sampler).exp().detach()) * new).sum(1)
    torch.testing.assert_close(gradient(logits, estimate(logits, sampler, name)), gradient(logits, exact), atol=1e-6, rtol=1e-6)
    assert (gradient(logits, exact).abs().max() < 1e-6) == (name == "whole")


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_sampler_whose_tail_is_the_trainers_is_centred_exactly(name: str) -> None:
    logits, sampler = policies()
    new, width = logits.log_softmax(1), 6
    rest = new[:, width:].detach().log_softmax(1) + torch.log1p(-sampler[:, :width].exp().sum(1, keepdim=True))
    whole = torch.cat([sampler[:, :width], rest], dim=1)
    exact = (whole.exp() * WEIGHTS[name][1]((new - whole).exp().detach()) * new).sum(1)
    torch.testing.assert_close(gradient(logits, estimate(logits, sampler[:, :width], name)), gradient(logits, exact), atol=1e-9, rtol=1e-6)


def test_coefficients_are_the_published_ones() -> None:
    logits, sampler = policies()
    for width in (1, 8, 20):
        new, q = logits.log_softmax(1)[:, :width], sampler[:, :width].exp()
        p = new.detach().exp()
        rho = (1 - q.sum(1)) / (1 - p.sum(1)).clamp(min=1e-6)
        capped = torch.minimum(p, 1.5 * q) - torch.ones_like(rho).clamp(max=1.5 * rho)[:, None] * p
        for name, coefficients in (("none", q - rho[:, None] * p), ("truncated", capped)):
            torch.testing.assert_close(estimate(logits, sampler[:, :width], name), (coefficients * new).sum(1))


def test_of_a_batch_it_adds_the_advantage_times_the_term_to_the_loss() -> None:
    """Slots without an id count for nothing; a token that the band rejects is centred, a token that is too old is not."""
    random, new = np.random.default_rng(0), torch.randn(9, VOCABULARY, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    made = []
    for chosen in (np.array([0, 1, 0, 1, 1], bool), np.array([0, 0, 1, 1], bool)):
        top, length = np.zeros((chosen.sum(), 3), TOP), len(chosen)
        top["id"] = np.argsort(random.random((len(top), VOCABULARY)), axis=1)[:, :3]
        top["logprob"] = np.log(random.random((len(top), 3)) / 4)
        top["logprob"][0, 2] = -np.inf
        made.append(sampled(random.integers(0, VOCABULARY, length), chosen, -2.0, 1 + (length == 5), group=length, top=top))
    batch = pack(dict(enumerate(made)), (0, 1), advantages=[0.5, -2.0], weights=[0.2, 0.2], grid=BatchGrid(), packed=True)
    assert batch.part(torch.tensor([2, 5])).top_ids[:, 0].tolist() == made[0].top["id"][1].tolist()
    plain = WEIGHTS["band"][0] | {"denominator": "planned", "max_age": 0}
    losses = [PolicyLoss(ObjectiveSection(correction=plain, score_centering=k), 1.0, 2) for k in (0, 3)]
    of_targets, of_top = new.gather(1, batch.targets[:, None]).squeeze(1), new.gather(1, batch.top_ids.t())
    (base, _), (whole, sums) = (loss(of_targets, batch, None, of_top if loss.section.score_centering else None) for loss in losses)
    wanted = 0.0
    for row, one in zip((0, 2, 3), made[0].top, strict=True):
        one = one[one["logprob"] > -np.inf]
        given = new[row, one["id"].astype(int)][None], torch.from_numpy(one["logprob"].copy())[None]
        wanted += 0.2 * 0.5 * centred(*given, CorrectionSection(**WEIGHTS["band"][0]))[0].item()
    assert whole.item() - base.item() == pytest.approx(wanted, rel=1e-5)
    tails = [1 - np.exp(one["logprob"]).sum() for trajectory in made for one in trajectory.top]
    assert losses[1].figures(sums)["plugin_metrics"]["score_centering/tail"] == pytest.approx(np.mean(tails), rel=1e-5)
    empty = pack({}, (), advantages=[], weights=[], grid=BatchGrid(), packed=True)
    assert losses[1](torch.zeros(1, requires_grad=True), empty, None)[1].keys() >= losses[1].sums.keys()


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": "mine:loss"},
        {"correction": {"weight": "sequence"}},
        {"proximal": "behaviour", "correction": {"weight": "none"}},
        {"correction": {"cap": None, "token_band": (0.5, 2.0)}},
    ],
)
def test_what_has_no_known_formula_is_refused(wrong: dict[str, Any]) -> None:
    ObjectiveSection(**wrong)
    with pytest.raises(ValidationError, match=r"because objective\.score_centering is above 0"):
        ObjectiveSection(**wrong, score_centering=8)


def test_it_needs_the_masks_of_truncated_sampling_and_a_vocabulary_of_that_size() -> None:
    asked: Any = {"objective": {"score_centering": 9}, "rollout": {"top_k": 20}}
    with pytest.raises(ConfigError, match=r"objective\.score_centering"):
        models.check(minimal(**asked), sized(ENGINE, "qwen3_moe") | {"vocab_size": 8})
    with pytest.raises(ConfigError, match=r"keep\.sampling_mask"):
        minimal(**asked, keep={"sampling_mask": "off"})
