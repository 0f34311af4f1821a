"""What is rejected, what is left of the denominator, and traps that others fell into."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.errors import InvariantBroken
from asyncmoe.trainer.objective import Rows, Sums, metrics, policy_loss, scale, segments, token_weights
from asyncmoe.trainer.objective.correction import RULES, Correction, correct
from asyncmoe.trainer.objective.surrogate import loglinear


def batch(
    log_rho: list[list[float]], advantages: list[float] | None = None, versions: list[list[int]] | None = None, **weighed: Any
) -> tuple[Rows, torch.Tensor]:
    """Sequences whose proximal policy is 0 and whose engine is minus the given log-ratios; and the trainer's log-probabilities, 0."""
    lengths = [len(s) for s in log_rho]
    weights = token_weights(lengths, **({"aggregation": "token_mean"} | weighed))
    count = sum(lengths)
    each = advantages or [1.0] * len(lengths)
    rows = Rows(
        mask=torch.ones(count, dtype=torch.bool),
        weights=torch.tensor(np.repeat(weights, lengths), dtype=torch.float32),
        advantages=torch.tensor(np.repeat(each, lengths), dtype=torch.float32),
        behaviour=-torch.tensor([x for s in log_rho for x in s], dtype=torch.float32),
        versions=torch.tensor([v for s in versions for v in s] if versions else [0] * count, dtype=torch.int32),
        pure=torch.ones(count, dtype=torch.bool),
        segments=segments(lengths, count),
        sequences=len(lengths),
        proximal=torch.zeros(count),
    )
    return rows, torch.zeros(count)


def judged(log_rho: list[list[float]], version: int = 0, new: list[float] | None = None, **rule: Any) -> Correction:
    advantages, versions = rule.pop("advantages", None), rule.pop("versions", None)
    proximal = rule.pop("proximal", "recompute")
    rows, logprobs = batch(log_rho, advantages, versions)
    section = ObjectiveSection(proximal=proximal, correction={"weight": "none"} | rule)  # type: ignore[arg-type]
    current = logprobs if new is None else torch.tensor(new)
    held = rows.clamped()
    return correct(current, held.behaviour if proximal == "behaviour" else logprobs, held, section, version)


def rejected(found: Correction) -> list[bool]:
    return found.rejected.any(dim=0).tolist()


def stepped(rows: Rows, logprobs: torch.Tensor, **options: Any) -> tuple[float, list[float], Sums]:
    """Loss and gradient with what was rejected out of the denominator."""
    current = logprobs.clone().requires_grad_()
    loss, sums = policy_loss(current, rows, ObjectiveSection(**options), 0)
    loss.backward()
    assert current.grad is not None
    return loss.item() * scale(sums), (current.grad * scale(sums)).tolist(), sums


LOG2 = math.log(2.0)


def test_a_token_band_keeps_the_ratios_it_names() -> None:
    """Not their inverses: [0.6, 1.4] keeps 1.39 and not 0.59, where comparing -log(ratio) with [log 0.6, log 1.4] would keep 1.6."""
    ratios = [0.59, 0.61, 0.72, 1.0, 1.39, 1.41, 1.6]
    assert rejected(judged([[math.log(r) for r in ratios]], token_band=[0.6, 1.4])) == [True, False, False, False, False, True, True]


def test_icepop_keeps_the_raw_ratio_inside_its_band() -> None:
    found = judged([[0.0, math.log(4.0), math.log(6.0), math.log(0.4)]], weight="token", cap=None, token_band=[0.5, 5.0])
    assert found.weight.tolist() == pytest.approx([1.0, 4.0, 6.0, 0.4])
    assert rejected(found) == [False, False, True, True]


def test_an_infinite_ratio_is_capped_and_not_dropped() -> None:
    found = judged([[math.inf, 1e30, -math.inf, 0.0]], weight="token", cap=2.0)
    assert found.weight.tolist() == pytest.approx([2.0, 2.0, 0.0, 1.0], abs=1e-6)
    assert found.capped.tolist() == [True, True, False, False]
    assert rejected(found) == [False] * 4
    assert rejected(judged([[math.inf, -math.inf, 0.0]], token_band=[0.0, 1e8])) == [True, False, False]


def test_products_are_of_the_sequence_and_means_geometric() -> None:
    pair = [[LOG2 / 2] * 4, [LOG2 / 2]]  # products 4 and 1.41, geometric means both 1.41
    assert rejected(judged(pair, sequence_band=[0.5, 2.0])) == [True] * 4 + [False]
    assert rejected(judged(pair, geometric_band=[0.5, 1.5])) == [False] * 5
    assert rejected(judged(pair, geometric_band=[0.5, 1.4])) == [True] * 5
    weighed = judged(pair, weight="sequence", cap=3.0)
    assert weighed.weight.tolist() == pytest.approx([3.0] * 4 + [math.sqrt(2)])
    assert weighed.capped.tolist() == [True] * 4 + [False]


def test_a_sequence_mask_leaves_the_tokens_their_raw_ratios() -> None:
    found = judged([[LOG2, -LOG2, 3 * LOG2, -3 * LOG2], [LOG2, LOG2]], weight="token", cap=None, geometric_band=[0.99, 1.01])
    assert found.weight[:4].tolist() == pytest.approx([2.0, 0.5, 8.0, 0.125])
    assert rejected(found) == [False] * 4 + [True] * 2


def test_one_token_vetoes_its_sequence_and_no_other() -> None:
    found = judged([[0.0, -10.0, 0.0], [0.0, 3.0], [5.0]], veto=[1e-4, 100.0])
    assert rejected(found) == [True] * 3 + [False] * 2 + [True]


def test_sequence_rules_count_what_other_rules_reject() -> None:
    """The length and the product are those of what was sampled: a rejected token does not change its sequence's ratio."""
    log_rho = [[3.0, -1.5, -1.5, 0.0]]
    found = judged(log_rho, token_band=[0.5, 2.0], sequence_band=[0.9, 1.1], geometric_band=[0.9, 1.1])
    assert rejected(found) == [True, True, True, False]
    assert found.rejected[RULES.index("sequence_band")].tolist() == [False] * 4


def test_the_ratio_of_a_sequence_counts_what_is_rejected() -> None:
    """GSPO's length is that of the original mask: with the rejected first token left out, the others' ratio would be 1."""
    rows, logprobs = batch([[3.0, 0.0, 0.0]])
    new = logprobs + torch.tensor([0.3, 0.0, 0.0])
    options = {"ratio": "sequence", "clip": "none", "correction": {"weight": "none", "token_band": [0.5, 2.0]}}
    loss, gradient, _ = stepped(rows, new, **options)
    assert loss == pytest.approx(-math.exp(0.1), rel=1e-6)
    assert gradient == pytest.approx([0.0, -math.exp(0.1) / 2, -math.exp(0.1) / 2], rel=1e-6)


@pytest.mark.parametrize("proximal", ["recompute", "behaviour"])
def test_opsm_rejects_bad_responses_the_trainer_has_left(proximal: str) -> None:
    """By engine and trainer, whatever the proximal policy: mean(log engine - log trainer) is 0.1, 0.1, -0.1 here."""
    found = judged(
        [[0.0, 0.0]] * 3, new=[-0.2, 0.0, -0.1, -0.1, 0.1, 0.1], advantages=[-1.0, 1.0, -1.0], opsm_delta=0.05, proximal=proximal
    )
    assert rejected(found) == [True, True, False, False, False, False]
    found = judged([[0.0, 0.0]], new=[-0.2, 0.0], advantages=[-1.0], opsm_delta=0.11, proximal=proximal)
    assert rejected(found) == [False, False]


def test_old_tokens_are_rejected_one_by_one() -> None:
    found = judged([[0.0] * 3, [0.0]], version=7, versions=[[4, 5, 7], [1]], max_age=2)
    assert rejected(found) == [True, False, False, True]


def test_without_a_proximal_policy_of_its_own_the_whole_ratio_is_judged_and_nothing_is_weighed() -> None:
    """Decoupled, the ratio that the clip does not see is judged; here the clip sees all of it, and it must not count twice."""
    found = judged([[0.0, 0.0]], new=[1.0, 0.0], token_band=[0.5, 2.0], proximal="behaviour")
    assert rejected(found) == [True, False]
    assert found.weight.tolist() == [1.0, 1.0]
    assert rejected(judged([[0.0, 0.0]], new=[1.0, 0.0], token_band=[0.5, 2.0])) == [False, False]


def test_rules_are_counted_each_on_its_own() -> None:
    rows, logprobs = batch([[3.0, 0.0], [0.0, 0.0]], versions=[[0, 0], [-3, 0]])
    rules = {"weight": "none", "token_band": [0.5, 2.0], "geometric_band": [0.5, 2.0], "max_age": 1}
    _, _, sums = stepped(rows, logprobs, correction=rules)
    assert dict(zip(RULES, sums["rejected"].tolist(), strict=True)) == {
        "token_band": 1,
        "sequence_band": 0,
        "geometric_band": 2,
        "veto": 0,
        "opsm": 0,
        "max_age": 1,
    }
    said = metrics(sums)
    assert said["rejected_fraction"] == 0.75
    assert said["rejected_by_rule"] == {"token_band": 0.25, "geometric_band": 0.5, "max_age": 0.25}
    assert said["rejected_by_age"] == {0: pytest.approx(2 / 3), 3: 1.0}


DENOMINATORS = {
    ("token_mean", "kept"): (1 + 2 + 2) / 3,
    ("token_mean", "planned"): (1 + 2 + 2) / 6,
    ("sequence_mean", "kept"): (1 + 2) / 2,
    ("sequence_mean", "planned"): (1 / 3 + 2) / 3,
    ("sequence_sum", "kept"): (1 + 2 + 2) / (3 * 10),
    ("sequence_sum", "planned"): (1 + 2 + 2) / (3 * 10),
    ("prompt_mean", "kept"): (1 / 5 + 2 / 5 + 2 / 5) / (3 / 5),
    ("prompt_mean", "planned"): (1 / 5 + 2 / 5 + 2 / 5) / 2,
}


@pytest.mark.parametrize(("aggregation", "denominator"), DENOMINATORS)
def test_rejected_tokens_leave_the_denominator(aggregation: str, denominator: str) -> None:
    """Sequences of 3, 2 and 1 tokens with losses 1, 2 and 4 a token; of the first one is kept, of the last none."""
    rows, logprobs = batch(
        [[9.0, 0.0, 9.0], [0.0, 0.0], [9.0]], [-1.0, -2.0, -4.0], aggregation=aggregation, groups=[0, 0, 1], max_new_tokens=10
    )
    rules = {"weight": "none", "token_band": [0.5, 2.0], "denominator": denominator}
    loss, gradient, sums = stepped(rows, logprobs, aggregation=aggregation, correction=rules)
    assert loss == pytest.approx(DENOMINATORS[aggregation, denominator], rel=1e-6)
    assert sum(gradient) == pytest.approx(loss, rel=1e-6)
    assert [g != 0 for g in gradient] == [False, True, False, True, True, False]
    assert int(sums["kept"]) == 3


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "prompt_mean"])
def test_a_batch_of_rejected_tokens_makes_no_step(aggregation: str) -> None:
    rows, logprobs = batch([[9.0, 9.0], [9.0]], aggregation=aggregation, groups=[0, 1], max_new_tokens=4)
    loss, gradient, sums = stepped(rows, logprobs, aggregation=aggregation, correction={"weight": "token", "token_band": [0.5, 2.0]})
    assert (loss, gradient, scale(sums), int(sums["kept"])) == (0.0, [0.0] * 3, 0.0, 0)
    said = metrics(sums)
    assert (said["rejected_fraction"], said["clip_fraction"]) == (1.0, 0.0)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "prompt_mean"])
def test_without_rejection_nothing_is_rescaled(aggregation: str) -> None:
    rows, logprobs = batch([[0.3, 0.1, 0.2], [0.1], []], aggregation=aggregation, groups=[0, 1, 1], max_new_tokens=4)
    assert stepped(rows, logprobs, aggregation=aggregation)[2]["kept_weight"] == rows.weights.double().sum()
    assert scale(stepped(rows, logprobs, aggregation=aggregation)[2]) == 1.0


def test_a_micro_batch_without_rows_counts_for_nothing() -> None:
    rows, logprobs = batch([])
    loss, gradient, sums = stepped(rows, logprobs)
    assert (loss, gradient) == (0.0, [])
    assert metrics(sums)["ages"] == {}
    padding = Rows(
        **{**vars(batch([[0.0, 0.0]])[0]), "mask": torch.zeros(2, dtype=torch.bool), "segments": segments([], 2), "sequences": 0}
    )
    loss, gradient, sums = stepped(padding, torch.tensor([math.nan, -math.inf]))
    assert (loss, gradient, float(sums["max_logprob_diff_same_version"])) == (0.0, [0.0, 0.0], -1.0)


@given(st.lists(st.integers(0, 1000), max_size=50), st.data())
def test_token_weights_sum_to_one(sampled: list[int], data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.integers(0, 3), min_size=len(sampled), max_size=len(sampled)))
    counts = np.array(sampled, np.float64)
    alive = counts > 0
    for aggregation in ("token_mean", "sequence_mean", "prompt_mean"):
        weights = token_weights(sampled, aggregation, groups)  # type: ignore[arg-type]
        assert float(weights @ counts) == pytest.approx(1 if alive.any() else 0)
    assert len(set(token_weights(sampled, "token_mean").tolist())) <= 1
    assert (token_weights(sampled, "sequence_mean") * counts)[alive] == pytest.approx(1 / max(alive.sum(), 1))
    by_prompt = token_weights(sampled, "prompt_mean", groups) * counts
    filled = {g for g, n in zip(groups, sampled, strict=True) if n}
    for group in filled:
        assert sum(w for w, g in zip(by_prompt, groups, strict=True) if g == group) == pytest.approx(1 / len(filled))
    constant = token_weights(sampled, "sequence_sum", max_new_tokens=1000)
    assert constant[alive] == pytest.approx(1 / (max(alive.sum(), 1) * 1000))


def test_what_an_aggregation_needs_is_asked_for() -> None:
    with pytest.raises(InvariantBroken, match="no max_new_tokens"):
        token_weights([1], "sequence_sum")
    with pytest.raises(InvariantBroken, match="a group for each"):
        token_weights([1], "prompt_mean")


def test_the_loglinear_policy_is_exact_where_log_probabilities_move_by_version() -> None:
    """Weights of version v give log-probability -v: then so does the estimate, from whichever version the token came."""
    versions, progress = [0, 2, 4, 5], 0.5
    rows, _ = batch([[float(v) for v in versions]], versions=[versions])
    at = torch.full((4,), -(5 + progress))
    assert loglinear(at, rows, 5, progress).tolist() == pytest.approx([-5.0] * 4)
    assert loglinear(at, rows, 5, 0.0).tolist() == at.tolist()  # before any update: the trainer's own
    assert loglinear(torch.full((4,), -7.0), rows, 5, 0.5)[3] == -5.0  # the newest version's tokens: as recorded


def test_a_token_from_the_future_stays_finite() -> None:
    """The step refuses it; until then nothing may break."""
    rows, _ = batch([[1.0]], versions=[[6]])
    for progress in (0.0, 0.5):
        assert loglinear(torch.tensor([-2.0]), rows, 5, progress).isfinite().all()
    _, sums = policy_loss(torch.tensor([-2.0]), rows, ObjectiveSection(), 5)
    assert (int(sums["future"]), sums["ages"][0].item()) == (1, 1.0)


def test_a_ratio_is_never_applied_twice() -> None:
    """Trainer 4 times as sure as the engine: whoever accounts for it, the gradient is 4 times the advantage."""
    new = torch.tensor([math.log(4.0)])
    rows, _ = batch([[0.0]])
    decoupled = Rows(**{**vars(rows), "proximal": new})
    ways = (
        (decoupled, {"correction": {"weight": "token", "cap": None}}),
        (rows, {"proximal": "behaviour", "clip": "none", "correction": {"weight": "none"}}),
        (rows, {"proximal": "behaviour", "clip": "cispo", "clip_high": 9.0, "correction": {"weight": "none"}}),
    )
    for at, options in ways:
        assert stepped(at, new, **options)[1] == pytest.approx([-4.0], rel=1e-6), options
